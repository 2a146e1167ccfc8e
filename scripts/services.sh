#!/usr/bin/env bash
# Installs what `make test-all` needs beside Python packages: Slurm, munge, Chromium, bubblewrap, iproute2.
# Debian and Ubuntu as root; elsewhere it says so and the tests that need them skip with that reason.
set -u
want=()
command -v slurmctld >/dev/null && command -v slurmd >/dev/null || want+=(slurmctld slurmd slurm-client munge)
command -v chromium >/dev/null || command -v google-chrome >/dev/null || want+=(chromium)
command -v bwrap >/dev/null || want+=(bubblewrap)
command -v ip >/dev/null || want+=(iproute2)
[ ${#want[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
  echo "not installed, and this is not a Debian machine with root: ${want[*]}" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q && apt-get install -y -q --no-install-recommends "${want[@]}"
