"""Large values outside the log: the record carries a small reference, object storage holds the bytes.

`claim_check` stores values before a record is sent and resolves references after one is read, so neither stages nor
other domain code ever see a reference; without a configured storage it passes values as they are. `reference` is what a
record carries instead; `blob_store` reads and writes blobs in a directory or bucket; `garbage_collection` deletes those
that no record refers to. Imports: runtime.kafka, topics, codec, settings, errors.
"""

from rollmill.runtime.claim_check.blob_store import BlobStore, StorageUnreachableError
from rollmill.runtime.claim_check.claim_check import ClaimCheck, largest_value
from rollmill.runtime.claim_check.reference import BlobReference, is_reference

__all__ = ["BlobReference", "BlobStore", "ClaimCheck", "StorageUnreachableError", "is_reference", "largest_value"]
