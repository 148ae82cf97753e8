"""Fakes and fixtures that tests of Rollmill, and of what is built on it, use. Not imported by the product."""
