//! A sandbox in which several agents run one after the other, each for its own run.
//!
//! Each agent starts with a claim, like the only agent of a [slot](super::claim), with its own output and its own run's
//! socket. After the agent and all its processes have ended, the host receives the exit status. After everything but
//! the agent's workspace is wiped, the host receives a ready byte and may send the next claim. Between these two bytes
//! no process of an agent exists.
//!
//! **Invariant:** if something of an agent remains, or this process has changed, no further agent starts: the sandbox
//! ends.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::stdio::{dup2_stderr, dup2_stdout, stderr, stdout};

use super::claim::AgentClaim;
use super::clean_state::CleanState;
use super::host_channel::HostChannel;
use super::reaper::ProcessReaper;
use super::{InitFailure, exit_status, run_agent};

/// Serves one claim after the other until the host disconnects.
pub(crate) fn serve_claims(
    host: &HostChannel,
    run_service: &ProcessReaper,
    mut claim: AgentClaim,
) -> Result<u8, InitFailure> {
    // The state of the first process is the reference for the check after each agent.
    let clean = CleanState::capture("serve several runs")?;
    let setup = |error: Errno| InitFailure::setup_failure("serve several runs", error);
    // Copies of our own outputs, above the standard descriptors, to restore between two agents.
    let own = [stdout(), stderr()].map(|own| rustix::io::fcntl_dupfd_cloexec(own, 3));
    let [own_stdout, own_stderr] = own;
    let (own_stdout, own_stderr) = (own_stdout.map_err(setup)?, own_stderr.map_err(setup)?);
    loop {
        let AgentClaim { options, output } = claim;
        let [stdout, stderr] = <[OwnedFd; 2]>::try_from(output).map_err(|_| {
            InitFailure::setup_failure("take the claim", "it comes without its output")
        })?;
        // Messages of this program about the run go to the run's own error output, as in a sandbox of its own.
        redirect_stdio(stdout, stderr).map_err(setup)?;
        let status = exit_status(run_agent(run_service, &options, Some(host)));
        dup2_stdout(&own_stdout).map_err(setup)?;
        dup2_stderr(&own_stderr).map_err(setup)?;
        // The status first: the host has the result even if the checks below end the sandbox.
        host.send_bytes(&[status])?;
        clean.restore()?;
        host.send_bytes(&[READY_BYTE])?;
        // From here on the sandbox is as clean as at its start.
        claim = host.receive_claim(run_service)?;
    }
}

fn redirect_stdio(stdout: OwnedFd, stderr: OwnedFd) -> Result<(), Errno> {
    dup2_stdout(stdout)?;
    dup2_stderr(stderr)
}

/// The byte that ends the work for one agent: the sandbox is ready for the next.
const READY_BYTE: u8 = 0;
