"""Counter-based noise that the kernels and their twins compute alike: Philox-4x32-7 (Salmon et al., SC 2011).

Every value depends on the seed, the row and a counter only, so rows are independent and results don't depend on how
work is split. Seven rounds are the fewest that pass BigCrush in the paper's table 2.
"""

import torch


ROUNDS = 7
# What a row's noise is for, the third counter word.
RACE, ACCEPT, DRAW = 0, 1, 2
_WORD = 0xFFFFFFFF


def key_words(seed: int) -> tuple[int, int]:
    """The two key words of a seed of up to 62 bits, each below 2**31 so that a kernel's argument types stay fixed."""
    return seed & 0x7FFFFFFF, (seed >> 31) & 0x7FFFFFFF


def philox(counter: torch.Tensor, row: torch.Tensor, purpose: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Four random 32-bit words, as int64, for each `counter` and `row` (int64, broadcast against each other)."""
    k0, k1 = key_words(seed)
    c0, c1 = torch.broadcast_tensors(counter, row)
    c2, c3 = torch.full_like(c0, purpose), torch.zeros_like(c0)
    for _ in range(ROUNDS):
        # 32 x 32 bits overflow int64's sign, but the shifted and masked words are still the right ones.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (b >> 32).bitwise_and_(_WORD).bitwise_xor_(c1).bitwise_xor_(k0), b.bitwise_and_(_WORD)
        c2, c3 = (a >> 32).bitwise_and_(_WORD).bitwise_xor_(c3).bitwise_xor_(k1), a.bitwise_and_(_WORD)
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(words: torch.Tensor) -> torch.Tensor:
    """float32 in (0, 1] from 32-bit words."""
    return (words.float() + 0.5) * 2.0**-32


def exponential(words: torch.Tensor) -> torch.Tensor:
    """float32 standard exponentials, -log(1 - u), from 32-bit words.

    Small values decide a race over a large vocabulary, so they keep the whole resolution of 2**-32: below 1/128 the
    series of the logarithm is used, where 1 - u would have lost the low bits of u.
    """
    u = uniform(words)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return torch.where(words < 2**25, series, -(uniform(_WORD - words).log()))


def race_exponentials(rows: torch.Tensor, vocab_size: int, seed: int) -> torch.Tensor:
    """float32 `[n, V]` exponentials of the rows `[n]`. Token v takes word v // Q of counter v % Q, Q = ceil(V / 4)."""
    counters = torch.arange(-(-vocab_size // 4), device=rows.device)
    words = torch.cat(philox(counters[None], rows[:, None], RACE, seed), dim=1)[:, :vocab_size]
    return exponential(words)


def inverse_cdf(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Tokens `[n]` at which the running sum of weights `[n, V]`, none negative, first reaches a share (float64 `[n]`,
    in (0, 1]) of their sum. Uniform shares give them the law of the normalised weights, and a row takes one random
    number instead of V, which a CPU makes one after the other."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    found = torch.searchsorted(sums, (share * sums[:, -1])[:, None]).squeeze(1)
    return found.clamp(max=weights.shape[1] - 1)


def draw_shares(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """float64 `[n]` in (0, 1] for `inverse_cdf`, of 53 bits, for the rows `[n]`."""
    high, low, *_ = philox(torch.zeros_like(rows), rows, DRAW, seed)
    return ((high << 21 | low >> 11) + 1).double() * 2.0**-53


def draw(weights: torch.Tensor) -> torch.Tensor:
    """Tokens `[n]` with the law of the normalised weights `[n, V]`, from torch's own generator."""
    if weights.device.type != "cpu":
        return torch.multinomial(weights, 1).squeeze(1)
    return inverse_cdf(weights, 1.0 - torch.rand(len(weights), dtype=torch.float64))
