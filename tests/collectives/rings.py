"""Every message of a ring, and what the ranks have after each step, by closed formulas."""


def messages_to_the_right(p: int) -> list[list[tuple[int, int, int, frozenset[int], int]]]:
    """Part c starts at rank c + 1 and gathers the ranks on its way to rank c. Then it goes around once more."""
    adding = [
        [
            (rank, (rank + 1) % p, (rank - step) % p, frozenset((rank - back) % p for back in range(step)), 1000)
            for rank in range(p)
        ]
        for step in range(1, p)
    ]
    copying = [
        [(rank, (rank + 1) % p, (rank - step) % p, frozenset(range(p)), 1000) for rank in range(p)]
        for step in range(p - 1)
    ]
    return adding + copying


def held_after(step: int, rank: int, chunk: int, p: int) -> frozenset[int]:
    """Which ranks are in this rank's sum of this chunk after a step: its own, its last p - 1 steps' sum, or all."""
    steps_to_get_here = (rank - chunk - 1) % p  # chunk c starts at rank c + 1
    if step < p - 1 or steps_to_get_here == step:
        known = {steps_to_get_here: frozenset((rank - back) % p for back in range(step + 1))}
        return known.get(step, frozenset({rank} if steps_to_get_here > step else ()))
    return frozenset(range(p) if (rank - chunk) % p <= step - (p - 1) else ())


def mirrored(p: int, steps: list[list[tuple]]) -> list[list[tuple]]:
    """The same in a mirror, in which rank r is rank -r."""

    def seen(source: int, target: int, chunk: int, ranks: frozenset[int], size: int) -> tuple:
        return -source % p, -target % p, -chunk % p, frozenset(-rank % p for rank in ranks), size

    return [sorted(seen(*message) for message in row) for row in steps]
