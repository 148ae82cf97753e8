"""The configs of evaluators that run tests, validated when a session opens."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from rollmill.models.base import FiniteFloat, PositiveInt, Record
from rollmill.strategies import ResourceRequest
from rollmill.strategies.sandbox import JobLimits, Step
from rollmill_evaluator.test_grading.frameworks import FRAMEWORKS, Framework, FrameworkName
from rollmill_evaluator.test_grading.scoring import ExitRule, ExpectedTests, Scoring, VerdictRewards
from rollmill_evaluator.test_grading.submission import Submission
from rollmill_evaluator.test_grading.workspace import REVISION

MIB = 2**20

Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
TreePath = Annotated[str, StringConstraints(pattern=r"^[^/\x00][^\x00]*$", max_length=4096)]


class Resources(Record):
    """What one run of the tests may take."""

    test_seconds: FiniteFloat = Field(default=300.0, gt=0)
    """For the tests; the verdict is ``timed_out`` where they take longer."""
    prepare_seconds: FiniteFloat = Field(default=60.0, gt=0)
    """For the work tree and the answer; taking longer is an infrastructure failure."""
    memory_mib: PositiveInt = 2048
    """Resident, of all processes together."""
    address_space_mib: PositiveInt | None = None
    """Of one process; None: ``memory_mib``. Go, Java and Node reserve much more than they use."""
    processes: PositiveInt = 256
    disk_mib: PositiveInt = 1024
    output_kib: PositiveInt = 4096
    """Of the tests' output that is read."""

    @property
    def requested(self) -> list[ResourceRequest]:
        """For the operator's maxima; each has the name of its field."""
        given = {name: getattr(self, name) for name in type(self).model_fields}
        return [ResourceRequest(f"resources.{name}", name, value) for name, value in given.items() if value is not None]

    @property
    def limits(self) -> JobLimits:
        space = self.address_space_mib
        return JobLimits(
            seconds=self.test_seconds,
            prepare_seconds=self.prepare_seconds,
            memory_bytes=self.memory_mib * MIB,
            address_space_bytes=None if space is None else space * MIB,
            processes=self.processes,
            disk_bytes=self.disk_mib * MIB,
            output_bytes=self.output_kib * 1024,
        )


class TestOnOutputConfig(Record):
    """The config of `test_on_output`."""

    source: Name
    """A repository, bundle, archive or folder, named below the evaluator's folder of sources."""
    commit: str = Field(default="HEAD", pattern=REVISION.pattern)
    """Of a repository or bundle."""
    strip: int = Field(default=0, ge=0)
    """Leading folders that are taken off an archive's paths."""
    answer: Submission = Submission()
    exclude: tuple[Name, ...] = ()
    """Patterns of paths that are left out of the patch, in addition to files that running Python creates."""
    protected: tuple[TreePath, ...] = ()
    """Files and folders that are restored from the source before the tests run, whatever the answer did to them."""
    fuzz: int = Field(default=0, ge=0, le=10)
    """Lines of context that `patch` may ignore where `git apply` rejects a hunk; 0: `git apply` alone decides."""
    test_command: Annotated[str, StringConstraints(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)]
    """A line for the shell, or a program and its arguments; runs in the work tree."""
    framework: FrameworkName = "pytest"
    report: TreePath | None = None
    """The result file in the work tree, for the frameworks that write one."""
    expected: ExpectedTests
    score: Literal["all", "fraction"] = "all"
    exit_code: ExitRule = "explained"
    rewards: VerdictRewards = VerdictRewards()
    environment: dict[str, str] = Field(default_factory=dict)
    image: Name | None = None
    """Run in a container of this image; None: on the evaluator's own system."""
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.result_parser.report != (self.report is not None):
            raise ValueError(f"framework {self.framework} and report do not go together: junit and jest need a report")
        for path in (*self.protected, *filter(None, (self.report,))):
            if ".." in path.split("/") or path.strip("./") == "":
                raise ValueError(f"{path!r} is not a path inside of the work tree")
        return self

    @property
    def result_parser(self) -> Framework:
        return FRAMEWORKS[self.framework]

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.expected, self.score, self.exit_code)

    @property
    def test_step(self) -> Step:
        command = self.test_command
        return Step.shell("test", command) if isinstance(command, str) else Step("test", command)
