"""What ``--data`` of ``gradstow bench`` reads: Fashion-MNIST, CIFAR-10, folders of images."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest

import gradstow

pytest.importorskip("typer")
pytest.importorskip("rich")

import torch


def test_fashion_and_cifar_are_read(tmp_path: Path) -> None:
    from gradstow.cli import _pictures
    from gradstow.cli._data import open_set

    for part, count in (("train", 6), ("t10k", 2)):
        with gzip.open(tmp_path / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + bytes(range(count)) * 784)
        with gzip.open(tmp_path / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + bytes(range(count)))
    samples = _pictures.fashion(3, 14, tmp_path)
    pixels, labels = samples.batch([5, 6])
    assert (len(samples), samples.held_out, pixels.shape) == (6, 2, (2, 3, 14, 14))
    assert labels.tolist() == [5, 0]
    assert 0 <= float(pixels.min()) <= float(pixels.max()) <= 5 / 255

    pytest.importorskip("torchvision")
    folder = tmp_path / "cifar" / _pictures.CIFAR10
    folder.mkdir(parents=True)
    with pytest.raises(gradstow.errors.GradstowError, match="is not whole"):
        open_set(str(folder.parent), channels=3, side=32, seq=1)


def test_cifar_has_the_layout_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    from gradstow.cli._data import open_set

    folder = tmp_path / datasets.CIFAR10.base_folder
    folder.mkdir()
    for name in [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]:
        pixels = torch.arange(2 * 3072).remainder(251).byte().view(2, 3072)
        (folder / name).write_bytes(pickle.dumps({"data": pixels.numpy(), "labels": [3, 7]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)
    samples = open_set(str(tmp_path), channels=3, side=32, seq=1)
    assert (samples.name, len(samples), samples.held_out, samples.classes) == ("cifar10", 10, 2, 10)
    pixels, labels = samples.batch([0, 11])
    assert labels.tolist() == [3, 7]
    assert torch.equal(pixels[0].flatten() * 255, torch.arange(3072).remainder(251).float())
    assert open_set(str(folder), channels=1, side=8, seq=1).batch([0])[0].shape == (1, 1, 8, 8)


def test_a_folder_with_a_test_half(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    image = pytest.importorskip("PIL.Image")
    from gradstow.cli._data import open_set

    for half, count in (("train", 4), ("test", 2)):
        for name in ("ant", "bee"):
            (tmp_path / half / name).mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (9, 9), (10 * number, 0, 100 * (half == "test"))).save(
                    tmp_path / half / name / f"{number}.png"
                )
    samples = open_set(str(tmp_path), channels=3, side=8, seq=1)
    assert (len(samples), samples.held_out, samples.classes) == (8, 4, 2)
    blue = samples.batch(range(12))[0][:, 2].amax((1, 2))
    assert [bool(b > 0.1) for b in blue] == [False] * 8 + [True] * 4
    (tmp_path / "test" / "ant").rename(tmp_path / "test" / "cat")
    with pytest.raises(gradstow.errors.GradstowError, match="hold other classes"):
        open_set(str(tmp_path), channels=3, side=8, seq=1)
