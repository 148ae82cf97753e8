"""An evaluator's answer, if it is one; and what its failure is called."""

from __future__ import annotations

from pydantic import ValidationError

from rollmill.errors import InfrastructureError, NotGradedError
from rollmill.models import EvalResult, Verdict

EVALUATOR_ERROR = "evaluator_error"
INVALID_RESULT = "invalid_result"

MAX_ERROR = 2000
"""Characters of an error's text that are kept."""


def checked(result: object) -> EvalResult:
    """The result, if it is one: validated again, since a model can be built past its validators."""
    if not isinstance(result, EvalResult):
        raise InvalidResultError(f"an EvalResult is expected, not {type(result).__name__}")
    try:
        return EvalResult.model_validate({name: getattr(result, name) for name in EvalResult.model_fields})
    except ValidationError as error:
        raise InvalidResultError(str(error)) from error


class InvalidResultError(Exception):
    """An evaluator's answer is no valid result."""


def named(error: BaseException, reason: str | None = None) -> EvalResult:
    """Not graded, because of ``error``."""
    text = f"{type(error).__name__}: {error}"[:MAX_ERROR]
    return EvalResult(not_graded=reason or _reason(error), verdict=Verdict.NOT_GRADED, metadata={"error": text})


def _reason(error: BaseException) -> str:
    """An evaluator that builds an invalid result meets the model's own refusal; a typed error names its reason."""
    if isinstance(error, InfrastructureError | NotGradedError):
        return error.reason
    refused = isinstance(error, ValidationError) and error.title == EvalResult.__name__
    return INVALID_RESULT if refused or isinstance(error, InvalidResultError) else EVALUATOR_ERROR
