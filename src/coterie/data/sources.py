"""The addresses of the public data sets, and the checksums of their files.

The MD5 checksums are those published by torchvision for the same files. The original site of MNIST
no longer serves the files; the address is that of PyTorch's copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DownloadSource:
    """The base address of a data set's files, and each file's checksum (``md5:...``)."""

    base: str
    files: Mapping[str, str]


SOURCES: dict[str, DownloadSource] = {
    "mnist": DownloadSource(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": DownloadSource(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "emnist": DownloadSource(
        "https://biometrics.nist.gov/cs_links/EMNIST/",
        {"gzip.zip": "md5:58c8d27c78d21e728a6bc7b3cc06412e"},
    ),
    "cifar-10": DownloadSource(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-python.tar.gz": "md5:c58f30108f718f92721af3b95e74349a"},
    ),
    "cifar-100": DownloadSource(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-100-python.tar.gz": "md5:eb9058c3a382ffc7106e4002c42a8d85"},
    ),
    "svhn": DownloadSource(
        "http://ufldl.stanford.edu/housenumbers/",
        {
            "train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3",
        },
    ),
}
