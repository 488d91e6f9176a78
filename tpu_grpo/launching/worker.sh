#!/usr/bin/env bash
# Runs on every worker of a slice; scripts/launch.py copies it to ~/.tpu_grpo and calls it over ssh. Bash, because the
# Python of a fresh TPU VM is older than ours.
#
#   ~/.tpu_grpo/code/            the checkout, with .venv; runs are started in it
#   ~/.tpu_grpo/jobs/<id>/       log, command, config.yaml, pid, keeper; exit_code once the run has ended
#   ~/.tpu_grpo/job              a link to the newest directory in jobs/
#   ~/.tpu_grpo/secrets.sh       only between the copy and the start of a run
#
# A command answers with lines "@key value"; all other output is for people.
set -uo pipefail
root=$HOME/.tpu_grpo
code=$root/code
job=$root/job
export PATH=$HOME/.local/bin:$PATH

die() {
    echo "worker: $*"
    exit 1
}

# A process is identified by its id and start time, because ids are used again, also after a reboot. Z: it has ended.
start_time() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" {print $20}'; }

# alive FILE: whether the process that the file names still exists
alive() {
    local pid started
    [ -e "$1" ] && read -r pid started <"$1" && [ "$(start_time "$pid")" = "$started" ]
}

# state -> none, running, ended, or lost: gone without an exit code, as after a reboot
state() {
    if [ ! -e "$job" ]; then echo none
    elif [ -e "$job/exit_code" ]; then echo ended
    elif alive "$job/keeper" || alive "$job/pid"; then echo running # the keeper writes the exit code
    else echo lost
    fi
}

# unpack REVISION: the archive replaces the files of the previous archive; what runs left in the checkout stays
unpack() {
    [ "$(state)" != running ] || die "a run is going on; stop it before its code is replaced"
    mkdir -p "$code"
    cd "$code" || die "cannot enter $code"
    [ ! -e "$root/files" ] || xargs -0 rm -f -- <"$root/files"
    tar -xzf "$root/code.tar.gz" --no-same-owner || die "the archive of the code is broken"
    mv "$root/files.new" "$root/files"
    echo "$1" >"$root/revision"
    rm -f "$root/code.tar.gz"
}

# install REQUIREMENT...: installs Python, all that the checkout pins, and the requirements with uv; then runs the
# user's setup script, if there is one
install() {
    cd "$code" || die "no code here; run setup first"
    local uv=(uv)
    if ! command -v uv >/dev/null; then
        python3 -m pip install --quiet --user uv || die "uv could not be installed with pip"
        uv=(python3 -m uv)
    fi
    "${uv[@]}" sync --no-dev --all-extras || die "uv could not install the environment"
    [ $# = 0 ] || "${uv[@]}" pip install --python .venv/bin/python "$@" || die "uv could not install $*"
    [ ! -e "$root/setup_script" ] || bash "$root/setup_script" || die "the setup script failed"
}

# start ID WORD...: runs the words in the checkout, detached
start() {
    local id=$1
    shift
    trap 'rm -f "$root/secrets.sh"' EXIT
    [ "$(state)" != running ] || die "a run is going on already: $(cat "$job/command")"
    [ -x "$code/.venv/bin/python" ] && cd "$code" || die "no code and environment here; run setup first"
    case " $* " in
    *" JAX_COMPILATION_CACHE_DIR=gs://"*)
        .venv/bin/python -c 'import gcsfs' 2>/dev/null || die "a cache on gs:// needs gcsfs; setup with --with gcsfs"
        ;;
    esac
    local dir=$root/jobs/$id
    mkdir -p "$dir"
    mv "$root/config.yaml" "$dir/" || die "the config has not been copied here"
    printf '%q ' "$@" >"$dir/command"
    if [ -e "$root/secrets.sh" ]; then . "$root/secrets.sh"; fi
    setsid bash "$root/worker.sh" keep "$dir" "$@" </dev/null >"$dir/log" 2>&1 &
    ln -sfn "jobs/$id" "$job"
    for _ in $(seq 200); do [ -s "$dir/pid" ] && break || sleep 0.05; done
    echo "@started $id"
}

# keep DIR WORD...: waits for the run and keeps its exit code, also while the machine shuts down
keep() {
    local dir=$1
    shift
    echo "$$ $(start_time $$)" >"$dir/keeper"
    trap : TERM INT HUP # not inherited, unlike ignoring them
    "$@" &
    local pid=$! code
    echo "$pid $(start_time "$pid")" >"$dir/pid"
    while :; do
        wait "$pid"
        code=$?
        [ $code -gt 128 ] && kill -0 "$pid" 2>/dev/null || break # a signal to this shell ends the wait, not the run
    done
    echo "$code" >"$dir/exit_code.new" && mv "$dir/exit_code.new" "$dir/exit_code"
}

status() {
    echo "@state $(state)"
    [ ! -e "$root/revision" ] || echo "@revision $(cat "$root/revision")"
    [ -e "$job" ] || return 0
    echo "@job $(basename "$(readlink "$job")")"
    [ ! -e "$job/pid" ] || echo "@pid $(cut -d' ' -f1 "$job/pid")"
    [ ! -e "$job/exit_code" ] || echo "@exit_code $(cat "$job/exit_code")"
    echo "@last $(tail -c 4000 "$job/log" | tr '\r' '\n' | grep -v '^[[:space:]]*$' | tail -n 1)"
}

# logs LINES [follow]: the end of the newest run's output; following it ends with the run
logs() {
    [ -e "$job" ] || die "no run here yet"
    if [ "${2:-}" = follow ] && alive "$job/pid"; then
        exec tail -n "$1" -f --pid="$(cut -d' ' -f1 "$job/pid")" "$job/log"
    fi
    tail -n "$1" "$job/log"
}

# stop SECONDS: SIGTERM, which lets a training run save a checkpoint; SIGKILL to all of its processes after SECONDS
stop() {
    local left=$(($1 * 5))
    if [ "$(state)" = running ]; then
        kill -TERM "$(cut -d' ' -f1 "$job/pid")" 2>/dev/null
        while [ "$(state)" = running ] && [ $left -gt 0 ]; do
            sleep 0.2
            left=$((left - 1))
        done
        if [ "$(state)" = running ]; then
            echo "worker: still running after $1 s, killed"
            kill -KILL "$(cut -d' ' -f1 "$job/pid")" 2>/dev/null
            for _ in $(seq 50); do [ -e "$job/exit_code" ] && break || sleep 0.1; done
        fi
        kill -KILL -- "-$(cut -d' ' -f1 "$job/keeper")" 2>/dev/null # its group: what the run left behind
    fi
    status
}

# filesystem DIRECTORY: the type of the file system that holds the directory, or will hold it
filesystem() {
    local at=$1
    while [ ! -e "$at" ]; do at=$(dirname "$at"); done
    echo "@filesystem $(findmnt -n -o FSTYPE -T "$at")"
}

case ${1:-} in
unpack | install | start | keep | status | logs | stop | filesystem) "$@"; exit $? ;;
*) die "unknown command: ${1:-}" ;;
esac
