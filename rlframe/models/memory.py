"""Memory of policies and Q-networks: recurrent, or causal attention over a window of the last rows of an episode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def cuts_episodes(model: nn.Module) -> bool:
    """Whether it has a Memory, which cuts sequences by the values of `first`, and so cannot be recorded as a graph."""
    return any(isinstance(module, Memory) for module in model.modules())


def _reset(state: Tree, first: Tensor) -> Tree:
    keep = (~first).unsqueeze(-1)
    return tuple(s * keep for s in state)


def _longest_stretch(first: Tensor) -> int:
    """Rows of the longest run without a reset in any column of [T, B]."""
    begins = torch.cat([torch.ones_like(first[:1]), first[1:], torch.ones_like(first[:1])])  # [T+1, B]
    at = begins.t().flatten().nonzero().squeeze(-1)
    return int(torch.diff(at).max())


class Transformer(nn.Module):
    """Blocks of causal self-attention with normalisation first (Xiong et al. 2020), on the rows of an episode.

    In each block a row attends to itself and to the `window` - 1 rows before it in its episode. The state has the
    inputs of each block at those rows [B, window - 1, layers, size], zero before the episode, and their number [B]
    (Dai et al. 2019, section 3.2). Learning takes them as they were when acting, without gradient.
    """

    def __init__(self, in_size: int, size: int, window: int, heads: int, layers: int) -> None:
        """`heads` divides `size`; `window` is at least 2."""
        super().__init__()
        self.size, self.window = size, window
        self.embed = nn.Linear(in_size, size)
        self.blocks = nn.ModuleList(_TransformerBlock(size, window, heads, layers) for _ in range(layers))
        self.norm = nn.LayerNorm(size)

    def initial_state(self, n: int) -> Tree:
        """No past rows for n environments."""
        device = self.norm.weight.device
        past = torch.zeros(n, self.window - 1, len(self.blocks), self.size, device=device)
        return past, torch.zeros(n, device=device)

    def forward(self, x: Tensor, first: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """Features [B, F] or [T, B, F] to outputs [..., size], and the state after the last row."""
        if x.dim() == 2:
            output, state = self._run(x.unsqueeze(1), first.unsqueeze(1), state)
            return output.squeeze(1), state
        output, state = self._run(x.transpose(0, 1), first.t(), state)
        return output.transpose(0, 1), state

    def _run(self, x: Tensor, first: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """The same for features [B, T, F] and `first` [B, T]."""
        past, n_past = state
        before = torch.arange(self.window - 1, 0, -1, device=x.device)  # how many rows each is before row 0
        episode = torch.cat([(before <= n_past.unsqueeze(1)).long() - 1, first.long().cumsum(1)], 1)  # -1: none
        spans = _Spans(episode, self.window)
        x, seen = self.embed(x), []
        for i, block in enumerate(self.blocks):
            rows = torch.cat([past[:, :, i], x], 1)
            seen.append(rows[:, x.shape[1] :])
            x = block(rows, x, spans)
        same = episode[:, first.shape[1] :] == episode[:, -1:]  # [B, window - 1]
        past = torch.stack(seen, 2).masked_fill(~same[:, :, None, None], 0.0)
        return self.norm(x), (past, same.sum(1).float())


class _Spans:
    """Division of T rows into n spans of C, each with the C + window - 1 rows that one of its rows may attend to.

    So the cost is linear in T, and acting is a single span of one row.
    """

    def __init__(self, episode: Tensor, window: int) -> None:
        """`episode` [B, window - 1 + T]: its number at each row, growing."""
        T = episode.shape[1] - window + 1
        self.window, self.C = window, min(T, window)
        self.n = -(-T // self.C)
        self.missing = self.n * self.C - T  # rows that the last span lacks
        row = torch.arange(self.C, device=episode.device).unsqueeze(1) + window - 1
        distance = row - torch.arange(self.C + window - 1, device=episode.device)  # [C, K] rows back
        self.distance = distance.clamp(0, window - 1)
        numbers = F.pad(episode, (0, self.missing), value=-2)  # a row that is missing sees itself
        own, others = numbers[:, window - 1 :].unflatten(1, (self.n, self.C)), self.seen(numbers.unsqueeze(-1))
        in_window = (distance >= 0) & (distance < window)
        self.visible = (in_window & (own.unsqueeze(-1) == others)).unsqueeze(2)  # [B, n, 1, C, K]

    def own(self, x: Tensor) -> Tensor:
        """[B, T, F] to [B, n, C, F], with zeros for missing rows."""
        return F.pad(x, (0, 0, 0, self.missing)).unflatten(1, (self.n, self.C))

    def seen(self, x: Tensor) -> Tensor:
        """[B, window - 1 + n C, F] to [B, n, F, K]."""
        return x.unfold(1, self.C + self.window - 1, self.C) if self.n > 1 else x.transpose(1, 2).unsqueeze(1)

    def joined(self, x: Tensor) -> Tensor:
        """[B, n, C, F] to [B, T, F]."""
        return x.flatten(1, 2)[:, : self.n * self.C - self.missing]


class _TransformerBlock(nn.Module):
    """x + attention, then x + two layers, each of normalised rows; attention has a learned bias for each distance.

    The bias (Raffel et al. 2020, section 2.1) starts as a slope for each head (Press et al. 2022), so that heads begin
    with different horizons.
    """

    def __init__(self, size: int, window: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.query, self.key, self.value, self.out = (nn.Linear(size, size) for _ in range(4))
        self.inner, self.outer = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        slope = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
        self.bias = nn.Parameter(-slope.unsqueeze(1) * torch.arange(window))  # [H, window]
        for linear in (self.query, self.key, self.value, self.out, self.inner, self.outer):
            added = linear in (self.out, self.outer)  # to x, which should not grow with depth (Radford et al. 2019)
            nn.init.orthogonal_(linear.weight, (2 * layers) ** -0.5 if added else 1.0)
            nn.init.zeros_(linear.bias)

    def forward(self, rows: Tensor, x: Tensor, spans: _Spans) -> Tensor:
        """Outputs [B, T, size] of x, the last rows of `rows` [B, window - 1 + T, size]."""
        x = x + self.out(self._attention(self.norm(rows), spans))
        return x + self.outer(F.relu(self.inner(self.norm_2(x))))

    def _attention(self, rows: Tensor, spans: _Spans) -> Tensor:
        size = rows.shape[-1] // self.heads
        query = spans.own(self.query(rows[:, spans.window - 1 :])).unflatten(-1, (self.heads, size)).transpose(2, 3)
        padded = F.pad(rows, (0, 0, 0, spans.missing))
        key, value = (spans.seen(f(padded)).unflatten(2, (self.heads, size)) for f in (self.key, self.value))
        score = query @ key * size**-0.5 + self.bias[:, spans.distance]  # [B, n, H, C, K]
        weight = score.masked_fill(~spans.visible, -torch.inf).softmax(-1)
        return spans.joined((weight @ value.mT).transpose(2, 3).flatten(-2))
