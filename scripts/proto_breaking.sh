#!/bin/sh
# Compares the protos with the last landed state: origin/main, or, when the checkout is
# just that, the commit before it.
set -eu
cd "$(dirname "$0")/.."
base=$(git rev-parse --verify --quiet origin/main || true)
if [ -z "$base" ] || [ "$base" = "$(git rev-parse HEAD)" ]; then
    base=$(git rev-parse --verify --quiet HEAD~1 || true)
fi
if [ -z "$base" ] || ! git cat-file -e "$base:protos/buf.yaml" 2>/dev/null; then
    echo "buf breaking: no landed protos to compare with yet"
    exit 0
fi
landed=$(mktemp -d)
trap 'rm -rf "$landed"' EXIT
git archive "$base" protos | tar -x -C "$landed"
.venv/bin/buf breaking protos --against "$landed/protos"
echo "buf breaking: compatible with $(git rev-parse --short "$base")"
