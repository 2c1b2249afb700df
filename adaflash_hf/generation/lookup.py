"""The free second source: continuations looked up in a row's own text.

The row's last tokens are searched in the text before them, and what followed there is proposed. It costs no forward
pass. Prompt lookup in transformers does the same with one n-gram size and a fixed length; here the longest match wins,
its length and whether it always went on alike tell how far to trust the continuation (`acceptance.py`), and a match
that runs into the end of the text goes on with what it has just copied, so that a loop is followed for as long as
wanted.
"""

from dataclasses import dataclass


INDEXED = 4
LONGEST_MATCH = 8
# How the latest two earlier matches went on: there is only one; differently; alike.
ONCE, MIXED, ALIKE = range(3)


@dataclass
class LookupDraft:
    """A looked-up continuation.

    Attributes:
        tokens: the proposed token ids.
        match: how many of the row's last tokens the earlier text shares, 1 to `LONGEST_MATCH`.
        history: `ONCE`, `MIXED` or `ALIKE`.
    """

    tokens: list[int]
    match: int
    history: int


class NgramIndex:
    """Where each run of up to `INDEXED` tokens last ended in a growing row, its own end excluded, and its history.

    Args:
        tokens: the row's committed tokens, padding left out.
    """

    def __init__(self, tokens: list[int]):
        self.tokens = list(tokens)
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}
        self._indexed = 0

    def extend(self, tokens: list[int]) -> None:
        """Adds committed tokens."""
        self.tokens.extend(tokens)

    def lookup(self, count: int) -> LookupDraft | None:
        """The `count` tokens that followed the longest earlier match of the row's end, the latest of equals; `None`
        when nothing matches."""
        self._index()
        tokens, length = self.tokens, len(self.tokens)
        for size in range(min(INDEXED, length), 0, -1):
            found = self._ends.get(tuple(tokens[length - size :]))
            if found is not None:
                break
        else:
            return None
        end, history = found
        while size < LONGEST_MATCH and end >= size and tokens[end - size] == tokens[length - 1 - size]:
            size += 1
        following = tokens[end + 1 : end + 1 + count]
        while len(following) < count:  # the match reaches the end: go round
            following.extend(following[: count - len(following)])
        return LookupDraft(following, size, history)

    def _index(self) -> None:
        """Indexes runs that end before the last token, which would find themselves otherwise."""
        tokens = self.tokens
        for end in range(self._indexed, len(tokens) - 1):
            for size in range(1, min(INDEXED, end + 1) + 1):
                run = tuple(tokens[end + 1 - size : end + 1])
                earlier, history = self._ends.get(run), ONCE
                if earlier is not None:
                    history = ALIKE if tokens[earlier[0] + 1] == tokens[end + 1] else MIXED
                self._ends[run] = end, history
        self._indexed = max(self._indexed, len(tokens) - 1)
