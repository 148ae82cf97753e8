"""Whether an evaluator's return value is a valid result, and which reason its failure gets."""

from __future__ import annotations

from pydantic import ValidationError

from rollmill.errors import InfrastructureError, NotGradedError
from rollmill.models import EvalResult, Verdict
from rollmill.strategies.foreign_code import describe

EVALUATOR_ERROR = "evaluator_error"
INVALID_RESULT = "invalid_result"

MAX_ERROR = 2000
"""Characters of an error's text that are kept."""


def validated_result(result: object) -> EvalResult:
    """``result``, validated again: ``model_construct`` builds one without validators. Raises InvalidResultError."""
    if not isinstance(result, EvalResult):
        raise InvalidResultError(f"an EvalResult is expected, not {type(result).__name__}")
    try:
        return EvalResult.validate_strictly(dict(result))
    except ValidationError as error:
        raise InvalidResultError(str(error)) from error


class InvalidResultError(Exception):
    """An evaluator returned something that is no valid result."""


def not_graded_result(error: BaseException, reason: str | None = None) -> EvalResult:
    """Not graded, because of ``error``."""
    text = describe(error)[:MAX_ERROR]
    return EvalResult(not_graded=reason or _reason(error), verdict=Verdict.NOT_GRADED, metadata={"error": text})


def _reason(error: BaseException) -> str:
    """A typed error names its reason. A ValidationError of `EvalResult`: the evaluator built an invalid one."""
    if isinstance(error, InfrastructureError | NotGradedError):
        return error.reason
    invalid = isinstance(error, ValidationError) and error.title == EvalResult.__name__
    return INVALID_RESULT if invalid or isinstance(error, InvalidResultError) else EVALUATOR_ERROR
