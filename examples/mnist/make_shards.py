"""Writes pictures of digits as TFRecord shards, in the layout of TensorFlow's old ``convert_to_records.py``.

    python make_shards.py --out shards                 # the digits that come with scikit-learn, without a download
    python make_shards.py --out shards --mnist         # MNIST itself, which Keras downloads

Each record is a ``tf.train.Example`` with the feature ``image_raw``, 28 × 28 bytes, and the int64 features ``label``,
``height``, ``width`` and ``depth``. scikit-learn's 1,797 digits are handwritten, too, but have 8 × 8 pixels in 17
greys. Each pixel becomes 3 × 3, and a margin of 2 is added on each side.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Images = npt.NDArray[np.uint8]  # (n, 28, 28)
Labels = npt.NDArray[Any]  # integers, (n,)


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    others = {path.name for path in args.out.glob("*.tfrecord")}
    others -= {name_of(kind, number, args.shards) for kind in ("train", "test") for number in range(args.shards)}
    if others:
        sys.exit(f"{args.out} holds other shards ({min(others)}, …): remove them, or choose another --out")
    for kind, (images, labels) in (read_mnist() if args.mnist else read_digits()).items():
        parts = np.array_split(np.arange(len(labels)), args.shards)
        for number, part in enumerate(parts):
            write_shard(args.out / name_of(kind, number, args.shards), images[part], labels[part])
        print(
            f"{kind}: {len(labels):,} pictures in {args.shards} shard{'s' * (args.shards > 1)}: {args.out}/",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write pictures of digits as TFRecord shards.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument("--mnist", action="store_true", help="take MNIST, which Keras downloads (11 MB)")
    parser.add_argument(
        "--shards", type=int, default=4, help="how many, for training; as many again for testing; default: 4"
    )
    return parser.parse_args()


def name_of(kind: str, number: int, num_shards: int) -> str:
    return f"{kind}-{number:05}-of-{num_shards:05}.tfrecord"


def read_mnist() -> dict[str, tuple[Images, Labels]]:
    (train_images, train_labels), (test_images, test_labels) = tf.keras.datasets.mnist.load_data()
    return {"train": (train_images, train_labels), "test": (test_images, test_labels)}


def read_digits() -> dict[str, tuple[Images, Labels]]:
    """scikit-learn's digits; every sixth one is for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    greys = (digits.images * 255 / 16).astype(np.uint8)
    images = np.pad(greys.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    is_test = np.arange(len(images)) % 6 == 0
    return {"train": (images[~is_test], digits.target[~is_test]), "test": (images[is_test], digits.target[is_test])}


def write_shard(path: Path, images: Images, labels: Labels) -> None:
    """Write a shard. It gets its name when it is complete."""

    def number(value: int) -> tf.train.Feature:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    unfinished = path.with_suffix(".unfinished")
    with tf.io.TFRecordWriter(str(unfinished)) as writer:
        for image, label in zip(images, labels, strict=True):
            stored = {
                "image_raw": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()])),
                "label": number(int(label)),
                **{"height": number(28), "width": number(28), "depth": number(1)},
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=stored)).SerializeToString())
    unfinished.replace(path)


if __name__ == "__main__":
    main()
