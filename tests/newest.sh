#!/bin/sh
# The tests of how data sets are used and how programs end, on the newest Python that TensorFlow supports: the end of
# an interpreter differs from one Python to the next. What is made lies in .newest, and stays there.
#
# A python3.13 on the PATH is used. Without one, Debian's is: a small Debian is made in .newest/debian, of the suite
# that has this Python, from the mirror that this machine's own packages come from. That needs root, debootstrap and
# a third of a gigabyte; its packages are downloaded out here, with this machine's pip, and the tests run in there.
#
#     tests/newest.sh [arguments of pytest]
set -eu
python=python3.13 version=3.13 suite=trixie
cd "$(dirname "$0")/.."
work=$PWD/.newest debian=$PWD/.newest/debian
mkdir -p "$work"
[ $# -gt 0 ] || set -- -n 2 --dist loadfile tests/endings $(ls -d tests/usage 2>/dev/null)

if "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ ! -e "$work/made" ]; then
        "$python" -m venv "$work/venv"
        "$work/venv/bin/python" -m pip install --quiet tensorflow-cpu --editable '.[test]'
        "$work/venv/bin/python" -m pip install --quiet --no-deps tf_keras  # it wants the package tensorflow
        touch "$work/made"
    fi
    exec "$work/venv/bin/python" -m pytest "$@"
fi

if [ ! -e "$work/debian-made" ]; then
    command -v debootstrap >/dev/null || {
        echo "There is no $python on the PATH, and no debootstrap to get one with (Debian: apt-get install debootstrap)."
        exit 1
    }
    mirror=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Created-By: Packages' | sed -n 's/^Debian //p' | head -n 1)
    rm -rf "$debian"
    debootstrap --variant=minbase --include="$python-venv" "$suite" "$debian" "$mirror" >"$work/debootstrap.log"
    mkdir -p "$debian/src" "$debian/wheels"
    .venv/bin/python -m pip download --quiet --dest "$debian/wheels" --python-version "$version" --only-binary :all: \
        setuptools wheel tensorflow-cpu '.[test]'
    .venv/bin/python -m pip download --quiet --dest "$debian/wheels" --no-deps tf_keras
    touch "$work/debian-made"
fi
# A namespace of its own for the mounts: they are gone when the tests are over.
exec unshare --mount sh -eu -c '
    mount --bind . "$0/src"
    mount -t proc proc "$0/proc"
    mount --rbind /dev "$0/dev"
    debian=$0
    exec chroot "$debian" sh -eu -c '\''
        cd /src
        export HOME=/root PATH=/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin
        if [ ! -e /venv/made ]; then
            "$0" -m venv /venv
            install="python -m pip --isolated install --quiet --no-index --find-links /wheels"
            $install setuptools wheel tensorflow-cpu
            $install --no-build-isolation --editable ".[test]"
            $install --no-deps tf_keras
            touch /venv/made
        fi
        exec python -m pytest "$@"
    '\'' "$@"
' "$debian" "$python" "$@"
