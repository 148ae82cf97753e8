"""Log-probs computed again under the weights that each token's label names."""

from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch

from relay.learning import packed_log_probs
from relay.model import RelayModel
from rollmill.trainer import PackedArrays

KEPT = 12


class KeptWeights:
    """The last versions of a model, oldest first to go."""

    def __init__(self, keep: int = KEPT) -> None:
        self._keep = keep
        self._models: OrderedDict[int, RelayModel] = OrderedDict()

    def keep(self, version: int, model: RelayModel) -> None:
        """Remember a copy of the weights as they are now."""
        self._models[version] = deepcopy(model).requires_grad_(requires_grad=False)
        while len(self._models) > self._keep:
            self._models.popitem(last=False)

    def find(self, epoch: int, version: int) -> RelayModel | None:
        """None: there never was such a version, or it is kept no longer."""
        return self._models.get(version) if epoch == 0 else None


@dataclass
class LogProbGap:
    """Over all tokens compared so far: the largest difference in nats, and how many were compared."""

    weights: KeptWeights = field(default_factory=KeptWeights)
    largest: float = 0.0
    tokens: int = 0
    unknown: list[str] = field(default_factory=list)
    """Labels that name weights which are not there, with the number of their tokens."""

    def compare(self, batches: Iterable[PackedArrays]) -> None:
        """Take in the trained tokens of some micro-batches."""
        for batch in batches:
            for epoch, version in np.unique(batch.versions[batch.loss_mask], axis=0).tolist():
                self._compare(batch, epoch, version)

    def _compare(self, batch: PackedArrays, epoch: int, version: int) -> None:
        chosen = batch.loss_mask & (batch.versions == (epoch, version)).all(axis=1)
        model = self.weights.find(epoch, version)
        if model is None:
            self.unknown.append(f"{int(chosen.sum())} tokens are labelled {epoch}:{version}, which is not kept")
            return
        now = packed_log_probs(model, torch.tensor(batch.input_ids), torch.tensor(batch.cu_seqlens)).numpy()
        difference = np.abs(now[chosen] - batch.behavior_log_probs[chosen])
        self.largest = float(np.maximum(self.largest, difference.max()))  # unlike max, it lets a NaN through
        self.tokens += int(chosen.sum())
