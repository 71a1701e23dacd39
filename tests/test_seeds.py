from specdec.seeds import choice_seed, derive_seed


def test_seeds_are_functions_of_their_arguments_and_differ() -> None:
    assert derive_seed(1, 2) == derive_seed(1, 2) < 2**64
    assert len({derive_seed(s, n) for s in range(10) for n in range(10)}) == 100
    assert choice_seed(7, 0) == 7
    assert len({choice_seed(7, n) for n in range(16)}) == 16
