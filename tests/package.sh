#!/bin/sh
# Builds a wheel and an sdist into dist/, installs each into a bare environment of its own, and tries it there, far from
# the checkout: make package.
#
#     tests/package.sh PYTHON    (one that has the package build)
set -eu
python=$1
cd "$(dirname "$0")/.."
rm -rf dist
"$python" -m build --outdir dist .
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
cp tests/installed.py "$away"
for package in dist/*.whl dist/*.tar.gz; do
    "$python" -m venv --clear "$away/venv"
    "$away/venv/bin/pip" install --quiet --disable-pip-version-check "$PWD/$package"
    (cd "$away" && venv/bin/python installed.py)
    echo "$package works"
done
