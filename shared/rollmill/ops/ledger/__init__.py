"""The ledger: captured = trained + excluded(reason) + dead-lettered(reason) + pending, per policy version
and per length of session.

In: the topics alone (`outcomes`, the changelogs, `built`, `trajectories`, `batches`, `acks`). Out: a `Balance`. It
keeps no state and writes nothing, so it may be read at any time, also on a running system.

reader: reads and balances. reconciliation: folds outcomes and tokens in flight, pure. in_flight: what stages hold.
balance: the numbers. pass_at_k: the report on eval sessions. log_reader, batch_header: topics to their end, headers of
batches.
"""

from rollmill.ops.ledger.balance import Balance, Totals
from rollmill.ops.ledger.reader import LedgerReader, balances, read_balance, settled_balance
from rollmill.ops.ledger.reconciliation import Reconciliation

__all__ = ["Balance", "LedgerReader", "Reconciliation", "Totals", "balances", "read_balance", "settled_balance"]
