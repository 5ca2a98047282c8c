//! The help of `cogni-gateway run`: its sections, in the order in which a new user needs them, and its texts.

use crate::gateway::config::SETTINGS;

/// Returns the section of an argument in the help, if the argument's own definition names none.
pub(super) fn section(id: &str) -> Option<&'static str> {
    Some(match id {
        "spec" | "agent" | "agents_dir" | "message" | "model" | "image" | "rootfs"
        | "workspace" | "env" | "argv" => "What to run",
        "max_runtime" | "max_memory" | "pids" | "cpus" | "max_output" | "max_workspace"
        | "grace" => "Limits of the sandbox",
        "driver" | "allow_unlimited" | "root" | "init" | "uids" | "uid" | "docker_socket"
        | "run_dir" | "proxy" | "proxy_image" | "proxy_network" => "The sandbox on this machine",
        "LITELLM_HOST" | "LITELLM_MASTER_KEY" | "BILLING_ACCOUNT_ID" => UPSTREAM,
        "MAX_TURNS"
        | "MAX_TOTAL_TOKENS"
        | "MAX_INPUT_TOKENS"
        | "MAX_OUTPUT_TOKENS"
        | "MAX_COST_USD"
        | "MAX_CONCURRENT"
        | "REQUESTS_PER_MINUTE"
        | "TOKENS_PER_MINUTE"
        | "RUN_DEADLINE_SECONDS"
        | "PRICES_FILE"
        | "UNKNOWN_PRICE" => BUDGET,
        // `--config` is not a setting of the table.
        "CONFIG" => "Other settings of the gateway",
        id if SETTINGS.iter().any(|setting| setting.name == id) => "Other settings of the gateway",
        _ => return None,
    })
}

/// Returns the rank of a setting's section among the sections of the gateway.
pub(super) fn rank(id: &str) -> usize {
    let section = section(id);
    let first = [Some(UPSTREAM), Some(BUDGET)];
    first.iter().position(|known| *known == section).unwrap_or(first.len())
}

const UPSTREAM: &str = "The upstream, and who pays";
const BUDGET: &str = "Budget of the model calls";

pub(super) const ABOUT: &str =
    "Run one program or agent in a sandbox, with the gateway as its only way out";

pub(super) const USAGE: &str = "\
cogni-gateway run [--image IMAGE | --rootfs DIR] [OPTIONS] -- PROGRAM [ARGUMENT]...
       cogni-gateway run --agent sandbox:agent --message TEXT --model NAME [OPTIONS]
       cogni-gateway run --spec FILE [OPTIONS]";

pub(super) const EXAMPLE: &str = "\
The program's output is shown on standard error as it comes; standard output has only the result,
one JSON object. Exit status: 0 the run was ok; 1 the run was not ok, or its result could not be
written; 2 the run could not begin: wrong usage, or a requirement is missing; 3 the run was ok, but
its work is not delivered: it is not in its branch, or its pull request or statement is missing (see
`cogni-gateway relay status`).

The gateway's settings are those of `cogni-gateway proxy`, with the same flags and variables. The
run has no operator's socket: SIGTERM, SIGINT and SIGHUP cancel it.

Example:
  cogni-gateway run --image agent:1 --workspace ./task:rw --max-runtime 5m --max-turns 20 \\
    --billing-account-id acct-1 --litellm-master-key-file /run/secrets/litellm -- python3 /agent.py";
