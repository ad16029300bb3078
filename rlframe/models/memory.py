"""Recurrent memory of policies and Q-networks, for acting on [B] rows and training on [T, B] rows with resets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from rlframe.core.struct import Tree

# Packed steps that take as long as one more call, on a CPU, where packed batches have no fused kernel. Forward and
# backward of an LSTM of 64 on [128, 8] with 2 % resets: 8 ms in spans, 23 packed; with 20 %: 39 and 8.
_SPAN_COST = 2


class Memory(nn.Module):
    """One LSTM or GRU layer. Its state is a tuple of [B, size] tensors, reset to zero where `first` is set."""

    def __init__(self, kind: str, in_size: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.n_states = 2 if kind == "lstm" else 1
        self.rnn = nn.LSTM(in_size, size) if kind == "lstm" else nn.GRU(in_size, size)
        for name, parameter in self.rnn.named_parameters():
            nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)

    def initial_state(self, n: int) -> Tree:
        """Zeros for n environments."""
        device = next(self.parameters()).device
        return tuple(torch.zeros(n, self.size, device=device) for _ in range(self.n_states))

    def forward(self, x: Tensor, first: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """Features [B, F] or [T, B, F] to outputs [..., size], and the state after the last row."""
        if x.dim() == 2:
            output, state = self._run(x.unsqueeze(0), _reset(state, first))
            return output.squeeze(0), state
        resets = first.any(1)  # [T] rows where any episode starts
        resets[0] = True
        rows = resets.nonzero().squeeze(-1).tolist()
        if x.device.type == "cpu" and len(rows) * _SPAN_COST < _longest_stretch(first):
            return self._run_spans(x, first, state, rows)
        if len(rows) == 1:
            return self._run(x, _reset(state, first[0]))
        return self._run_stretches(x, first, _reset(state, first[0]))

    def _run_spans(self, x: Tensor, first: Tensor, state: Tree, rows: list[int]) -> tuple[Tensor, Tree]:
        """Cut all columns wherever an episode starts in one, and run the spans in turn; fast with few resets."""
        outputs = []
        for begin, end in zip(rows, [*rows[1:], len(x)], strict=True):
            output, state = self._run(x[begin:end], _reset(state, first[begin]))
            outputs.append(output)
        return torch.cat(outputs), state

    def _run(self, x: Tensor | PackedSequence, state: Tree) -> tuple[Tensor, Tree]:
        stacked = tuple(s.unsqueeze(0).contiguous() for s in state)
        output, after = self.rnn(x, stacked if self.n_states == 2 else stacked[0])
        after = after if self.n_states == 2 else (after,)
        return output, tuple(s.squeeze(0) for s in after)

    def _run_stretches(self, x: Tensor, first: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """Cut each column where an episode starts and run all stretches as one packed batch, without padding.

        The cost depends on the longest stretch, not on the number of resets.
        """
        T, B = first.shape
        begins = first.t().clone()  # [B, T]: column after column
        begins[:, 0] = True
        start = begins.flatten().nonzero().squeeze(-1)  # [N] positions in the flat [B * T] order
        length = torch.diff(start, append=start.new_tensor([B * T]))
        longest_first = length.argsort(descending=True, stable=True)
        step = torch.arange(int(length.max()), device=x.device).unsqueeze(-1)
        inside = step < length[longest_first]  # [L, N]
        rows = (start[longest_first] + step)[inside]  # [B * T] by step, of the stretches not ended yet
        packed = PackedSequence(x.transpose(0, 1).reshape(B * T, -1)[rows], inside.sum(1).cpu())
        heads_column = (start % T == 0).nonzero().squeeze(-1)  # [B] first stretch of each column
        before = tuple(s.new_zeros(len(start), self.size).index_copy(0, heads_column, s) for s in state)
        output, after = self._run(packed, tuple(s[longest_first] for s in before))
        output = torch.zeros_like(output.data).index_copy(0, rows, output.data)  # [B * T, size] in the original order
        ends_column = torch.cat([heads_column[1:], heads_column.new_tensor([len(start)])]) - 1
        ends_column = longest_first.argsort()[ends_column]  # places in the packed batch
        return output.view(B, T, -1).transpose(0, 1), tuple(s[ends_column] for s in after)


def _reset(state: Tree, first: Tensor) -> Tree:
    keep = (~first).unsqueeze(-1)
    return tuple(s * keep for s in state)


def _longest_stretch(first: Tensor) -> int:
    """Rows of the longest run without a reset in any column of [T, B]."""
    begins = torch.cat([torch.ones_like(first[:1]), first[1:], torch.ones_like(first[:1])])  # [T+1, B]
    at = begins.t().flatten().nonzero().squeeze(-1)
    return int(torch.diff(at).max())
