"""Strategies by stable name or ``module:ClassName``: base classes and the registry that constructs them.

Names come from entry points (groups ``rollmill.builders``, ``rollmill.evaluators``, ``rollmill.advantages``,
``rollmill.group_scorers``), so that capture can validate a spec when a session opens, and so that any package can add
its own.

bases: the abstract classes. registry: `StrategyRegistry` and the registries of the four kinds. services: what
evaluators may know of services outside. sandbox: the contract for running untrusted code. decoding: a configured
tokenizer. allow_list: which modules a name may import. foreign_code: runs strategies so that only their job can end.
maxima: whether a spec asks for more than the operator allows. May import `rollmill.models` and errors only.
"""

from rollmill.strategies.bases import (
    BaseAdvantage,
    BaseGroupScorer,
    BaseIncrementalBuilder,
    BasePairwiseScorer,
    BaseTrajectoryBuilder,
    BaseTrajectoryEvaluator,
    EvaluationContext,
    trajectory_of,
)
from rollmill.strategies.maxima import (
    AboveMaximumError,
    ResourceRequest,
    require_countable,
    require_requests_within,
    require_spec_within,
)
from rollmill.strategies.registry import (
    StrategyRegistry,
    advantage_registry,
    builder_registry,
    evaluator_registry,
    group_scorer_registry,
    validate_session_spec,
)
from rollmill.strategies.services import ExternalService, ResourceClass

__all__ = [
    "AboveMaximumError",
    "BaseAdvantage",
    "BaseGroupScorer",
    "BaseIncrementalBuilder",
    "BasePairwiseScorer",
    "BaseTrajectoryBuilder",
    "BaseTrajectoryEvaluator",
    "EvaluationContext",
    "ExternalService",
    "ResourceClass",
    "ResourceRequest",
    "StrategyRegistry",
    "advantage_registry",
    "builder_registry",
    "evaluator_registry",
    "group_scorer_registry",
    "require_countable",
    "require_requests_within",
    "require_spec_within",
    "trajectory_of",
    "validate_session_spec",
]
