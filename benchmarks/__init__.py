"""Measurements that we stand behind: each says what is compared with what, on which machine, at which commit."""
