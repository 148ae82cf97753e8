"""Large values outside the log: the record carries a small reference, object storage holds the bytes.

`ClaimCheck` checks values in before a record is sent and redeems references after one is read, so neither stages nor
other domain code ever see a reference. Without a configured storage nothing here is in the way.
"""

from rollmill.runtime.claim_check.blob_store import BlobStore, StorageUnreachableError
from rollmill.runtime.claim_check.claim_check import ClaimCheck, largest_value
from rollmill.runtime.claim_check.reference import BlobReference, is_reference

__all__ = ["BlobReference", "BlobStore", "ClaimCheck", "StorageUnreachableError", "is_reference", "largest_value"]
