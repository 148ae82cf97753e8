"""The ledger: captured = trained + excluded(reason) + dead-lettered(reason) + pending, per policy version
and per length of session.

In: the topics alone (`completions`, `dead-letters`, `outcomes`, the changelogs, `built`, `trajectories`, `batches`,
`acks`). Out: a `Balance`. It keeps no state and writes nothing, so it may be read at any time, also on a running
system.

reader: reads and balances. reconciliation: folds outcomes and tokens in flight, pure, by token_ranges. in_flight: what
stages hold. unread_calls: what no outcome names yet. balance: the numbers. pass_at_k: the report on eval sessions.
batch_header: headers of batches.
"""

from rollmill.ops.ledger.balance import Balance, Totals
from rollmill.ops.ledger.reader import LedgerReader, balances, read_balance, settled_balance
from rollmill.ops.ledger.reconciliation import Reconciliation

__all__ = ["Balance", "LedgerReader", "Reconciliation", "Totals", "balances", "read_balance", "settled_balance"]
