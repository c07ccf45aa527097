#!/usr/bin/env bash
# The browser that the page's tests drive: Debian's chromium. Where it cannot be installed (no apt,
# not root) nothing happens, and those tests are skipped with a note. CEDAR_CHROMIUM names another.
set -euo pipefail
if [ -n "${CEDAR_CHROMIUM:-}" ] || command -v chromium >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "chromium is missing and cannot be installed here; the page's tests will be skipped" >&2
    exit 0
fi
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends chromium fonts-dejavu-core >/dev/null; }; then
    echo "chromium could not be installed; the page's tests will be skipped" >&2
fi
