# Sourced by bash on every host, after the variables of `-x` are set.
ulimit -n 65536
if command -v module >/dev/null; then module load cuda; fi
export HF_HUB_OFFLINE=1
