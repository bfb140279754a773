#!/usr/bin/env bash
# Run benchlib with UCC on a Debian that has none: a root folder of Debian sid with libucc, libucx and a compiler, in
# which this machine's own Python and checkout work.
#
#     scripts/ucc_root.sh ROOT                                  # make it, once: three minutes, 750 MB
#     scripts/ucc_root.sh ROOT .venv/bin/benchlib run collectives --set collective=ucc --set nproc=2
#
# As root, on Debian or a relative of it (mmdebstrap is installed where it is missing). Nothing of sid gets into the
# system. Inside ROOT, /proc, /sys, /dev and the folders that hold Python, the checkout and the working folder are the
# machine's own, for as long as the command runs.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,11p' "$0"; exit 2; }
[ "$(id -u)" = 0 ] || { echo "run it as root: a root folder needs mounts" >&2; exit 1; }
root=$1
shift
checkout=$(cd "$(dirname "$0")/.." && pwd)

if [ ! -e "$root/usr/include/ucc/api/ucc.h" ]; then
    if ! command -v mmdebstrap >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mmdebstrap
    fi
    mirror=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d/ 2>/dev/null | head -1 || true)
    # The last five are what modules of Python itself load.
    # The lists of a frozen mirror are past their date; their signature is checked all the same.
    mmdebstrap --quiet --aptopt='Acquire::Check-Valid-Until "false"' --variant=minbase --include=libucc-dev,libucx-dev,g++,ninja-build,libgomp1,libffi8,libsqlite3-0,libssl3t64,libreadline8t64 \
        sid "$root" ${mirror:+"deb $mirror sid main"} # without one mmdebstrap takes Debian's own
    chmod 755 "$root"
fi
[ $# -ge 1 ] || set -- "$checkout/.venv/bin/python" -m benchlib.runtime.ucc.library # compiles the kit's part of it
root=$(cd "$root" && pwd)

# Everything below happens in a mount namespace of its own, which goes with the command. Python's own folders: of the
# virtual environment and of the interpreter that it is made from.
python=$checkout/.venv/bin/python
mapfile -t folders < <("$python" -c 'import sys; print(*dict.fromkeys((sys.prefix, sys.base_prefix)), sep="\n")')
exec unshare --mount --propagation private -- bash -c '
    root=$1 count=$2
    shift 2
    for folder in /proc /sys /dev /tmp "${@:1:count}"; do
        case $folder in /usr) continue ;; esac
        mkdir -p "$root$folder"
        mount --rbind "$folder" "$root$folder"
    done
    shift "$count"
    where=$PWD
    exec chroot "$root" /bin/sh -c "cd \"\$1\" && shift && exec \"\$@\"" - "$where" "$@"
' - "$root" $((${#folders[@]} + 2)) "${folders[@]}" "$checkout" "$PWD" "$@"
