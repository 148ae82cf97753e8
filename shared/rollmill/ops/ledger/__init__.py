"""The ledger: captured = trained + excluded(reason) + dead-lettered(reason) + pending, per policy version
and per length of session.

In: the topics alone (`outcomes`, the changelogs, `built`, `trajectories`, `batches`, `acks`). Out: a `Balance`. It
keeps no state and writes nothing, so it may be asked at any time, of a running system too.
"""

from rollmill.ops.ledger.balance import Balance, Totals
from rollmill.ops.ledger.reader import LedgerReader, balances, read_balance, settled_balance
from rollmill.ops.ledger.reconciliation import Reconciliation

__all__ = ["Balance", "LedgerReader", "Reconciliation", "Totals", "balances", "read_balance", "settled_balance"]
