"""Angles between subspaces."""

import numpy as np
import pytest
from scipy.linalg import svdvals

from coterie.clustering import (
    agglomerate,
    basis,
    best_cut,
    canonical,
    paired_angle_matrix,
    principal_angles,
    smallest_angle_matrix,
)
from coterie.errors import ConfigError, TrainingError


def rng(seed=0):
    return np.random.default_rng(seed)


def turned(degrees):
    """The plane of x and z, its first axis turned towards y."""
    a = np.radians(degrees)
    return np.array([[np.cos(a), 0.0], [np.sin(a), 0.0], [0.0, 1.0]])


def some(n, features=20, p=3):
    return [np.linalg.qr(rng(i).normal(size=(features, p)))[0] for i in range(n)]


def test_by_hand():
    x, y, z = np.eye(3)
    np.testing.assert_allclose(principal_angles(x[:, None], y[:, None]), [90])
    np.testing.assert_allclose(principal_angles(turned(0), turned(30)), [0, 30], atol=1e-12)
    np.testing.assert_allclose(
        principal_angles(np.stack([x, y], 1), np.stack([x, z], 1)), [0, 90], atol=1e-12
    )
    np.testing.assert_allclose(principal_angles(turned(0), turned(170)), [0, 10], atol=1e-12)


def test_angles_are_the_arc_cosines_of_the_singular_values():
    a, b = some(2)
    expected = np.degrees(np.arccos(np.clip(svdvals(a.T @ b), 0, 1)))
    np.testing.assert_allclose(principal_angles(a, b), expected)
    assert (np.diff(principal_angles(a, b)) > 0).all()


@pytest.mark.parametrize("degrees", [1e-10, 1e-7, 1e-3, 1.0, 89.0])
def test_small_angles_keep_their_digits(degrees):
    a, b = (turned(d)[:, :1] for d in (0, degrees))
    assert principal_angles(a, b)[0] == pytest.approx(degrees, rel=1e-5)
    assert smallest_angle_matrix([a, b])[0, 1] == pytest.approx(degrees, rel=1e-5)
    assert paired_angle_matrix([a, -b])[0, 1] == pytest.approx(degrees, rel=1e-5)


def test_the_matrix_holds_the_smallest_angle_of_every_pair():
    bases = some(6)
    angles = smallest_angle_matrix(bases)
    expected = [[principal_angles(a, b)[0] for b in bases] for a in bases]
    np.testing.assert_allclose(angles, expected, atol=1e-6)
    assert (angles == angles.T).all()
    assert (angles.diagonal() == 0).all()
    assert smallest_angle_matrix(bases[:1]).tolist() == [[0.0]]


def test_the_smallest_angle_belongs_to_the_space_not_to_its_basis():
    bases = some(4)
    mixed = [b @ np.linalg.qr(rng(i).normal(size=(3, 3)))[0] for i, b in enumerate(bases)]
    np.testing.assert_allclose(smallest_angle_matrix(mixed), smallest_angle_matrix(bases))
    assert smallest_angle_matrix([bases[0], mixed[0]])[0, 1] < 1e-10
    x, y, z = np.eye(3)
    pair = smallest_angle_matrix([np.stack([x, y], 1), np.stack([z, y], 1)])
    np.testing.assert_allclose(pair, 0, atol=1e-12)


def test_paired_angles_by_hand_and_by_loops():
    # 30° and 0°; the sign of a vector does not count, its place does.
    np.testing.assert_allclose(paired_angle_matrix([turned(0), turned(30)])[0, 1], 30)
    np.testing.assert_allclose(paired_angle_matrix([turned(0), turned(150)])[0, 1], 30)
    np.testing.assert_allclose(paired_angle_matrix([turned(0), turned(0)[:, ::-1]])[0, 1], 180)
    bases = some(5)

    def naive(a, b):
        return sum(np.degrees(np.arccos(min(abs(u @ v), 1))) for u, v in zip(a.T, b.T, strict=True))

    expected = [[naive(a, b) for b in bases] for a in bases]
    angles = paired_angle_matrix(bases)
    np.testing.assert_allclose(angles, expected, atol=1e-5)
    assert (angles == angles.T).all()
    assert (angles.diagonal() == 0).all()
    signs = [b * rng(i).choice([-1, 1], 3) for i, b in enumerate(bases)]
    np.testing.assert_allclose(paired_angle_matrix(signs), angles)


@pytest.mark.parametrize("matrix", [smallest_angle_matrix, paired_angle_matrix])
def test_equal_bases_are_at_zero_and_orthogonal_ones_at_ninety(matrix):
    a, b = np.eye(6)[:, :1], np.eye(6)[:, 1:2]
    np.testing.assert_allclose(matrix([a, b, a]), [[0, 90, 0], [90, 0, 90], [0, 90, 0]])


@pytest.mark.parametrize("matrix", [smallest_angle_matrix, paired_angle_matrix])
@pytest.mark.parametrize("seed", range(5))
def test_clients_with_data_of_one_kind_are_found_in_any_order(matrix, seed):
    truth = np.arange(12) % 3
    kinds = [rng(seed + g).normal(size=(40, 2)) * [9, 4] for g in range(3)]
    data = [
        kinds[g] @ rng(seed + i).normal(size=(2, 60)) + 0.1 * rng(i).normal(size=(40, 60))
        for i, g in enumerate(truth)
    ]
    order = rng(seed).permutation(12)
    for way in (np.arange(12), order):
        result = matrix([basis(data[i], 2) for i in way])
        assert (
            best_cut(result, agglomerate(result)).labels.tolist() == canonical(truth[way]).tolist()
        )


def test_a_basis_spans_the_strongest_directions():
    data = np.zeros((5, 7))
    data[3, 2], data[1, 4], data[0, 0] = 5.0, 9.0, 1.0
    result = basis(data.astype(np.float32), 2)
    np.testing.assert_allclose(abs(result), np.eye(5)[:, [1, 3]], atol=1e-12)
    assert result.dtype == np.float64
    any_data = basis(rng().normal(size=(8, 30)), 4)
    np.testing.assert_allclose(any_data.T @ any_data, np.eye(4), atol=1e-12)


def test_wrong_arguments_are_refused():
    for p in (0, 4):
        with pytest.raises(ConfigError, match=r"\(5, 3\)"):
            basis(np.ones((5, 3)), p)
    with pytest.raises(ConfigError):
        principal_angles(np.eye(3), np.eye(4))
    with pytest.raises(ConfigError):
        smallest_angle_matrix([np.eye(3)[:, :1], np.eye(3)[:, :2]])
    for function in (smallest_angle_matrix, paired_angle_matrix):
        with pytest.raises(TrainingError):
            function([np.full((3, 1), np.nan), np.ones((3, 1))])
    with pytest.raises(TrainingError):
        basis([[np.nan]], 1)
