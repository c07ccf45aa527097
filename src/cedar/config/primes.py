"""The bucket sizes of the Engram hash: consecutive primes that are never used twice."""

from __future__ import annotations

# Enough witnesses for a deterministic answer below 3.3e24.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def is_prime(number: int) -> bool:
    """Deterministic Miller-Rabin test for ``number`` < 3.3e24."""
    if number < 2:
        return False
    for witness in _WITNESSES:
        if number % witness == 0:
            return number == witness
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, witness, odd, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def engram_primes(
    vocab_size: int, num_layers: int, max_ngram_size: int, num_heads: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Bucket sizes ``[layer][n-gram order 2 .. max][head]`` of all Engram tables.

    For every layer and every order the search starts anew just above ``vocab_size - 1``; a
    prime that any earlier layer, order or head took is skipped.
    """
    taken: set[int] = set()
    layers = []
    for _ in range(num_layers):
        orders = []
        for _ in range(2, max_ngram_size + 1):
            heads: list[int] = []
            candidate = vocab_size
            while len(heads) < num_heads:
                if candidate not in taken and is_prime(candidate):
                    taken.add(candidate)
                    heads.append(candidate)
                candidate += 1
            orders.append(tuple(heads))
        layers.append(tuple(orders))
    return tuple(layers)


def engram_rows(
    vocab_size: int, num_layers: int, max_ngram_size: int, num_heads: int
) -> tuple[int, ...]:
    """Number of table rows of each Engram layer: the sum of its bucket sizes."""
    primes = engram_primes(vocab_size, num_layers, max_ngram_size, num_heads)
    return tuple(sum(map(sum, orders)) for orders in primes)
