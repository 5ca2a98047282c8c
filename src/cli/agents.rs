//! `cogni-gateway agents`: lists the catalog, and checks which of its agents can run on this machine.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use serde_json::json;

use super::relay::StateDirArgs;
use super::run::{AgentsDirArgs, SandboxPathArgs, resolve_init_binary};
use crate::runner::agents::availability::{HostCapabilities, check_available};
use crate::runner::agents::{self, AgentCatalog, AgentDefinition, AgentSummary, DriverChoice};

/// The flags of `agents`.
#[derive(Debug, clap::Args)]
pub struct AgentsArgs {
    #[command(flatten)]
    agents: AgentsDirArgs,

    #[command(flatten)]
    places: SandboxPathArgs,

    /// The sandbox's first process [default: the cogni-init that this program carries]
    #[arg(long, value_name = "PATH", env = "COGNI_INIT")]
    init: Option<PathBuf>,

    #[command(flatten)]
    state: StateDirArgs,

    /// Also show agents that cannot run here, with the reason
    #[arg(long)]
    all: bool,

    /// Print the list as JSON, in the format of the API
    #[arg(long, conflicts_with = "file")]
    json: bool,

    /// Print the file of a built-in agent, as a start for your own
    #[arg(long, value_name = "NAME")]
    file: Option<String>,
}

pub fn run(args: &AgentsArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    if let Some(name) = &args.file {
        // Report an unknown name as such; an agent of the catalog without a file is a different error.
        let Some(text) = agents::builtin_file(name) else {
            AgentCatalog::builtin().find_agent(name)?;
            bail!("the built-in agent `{name}` has no file to print");
        };
        out.write_all(text.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let catalog = args.agents.load_catalog()?;
    let listed = args.list_agents(&catalog)?;
    // Only the number of hidden agents is printed, to mention `--all`.
    let hidden = listed.iter().filter(|(_, listed)| !listed.available && !args.all).count();
    let shown = listed.into_iter().filter(|(_, listed)| listed.available || args.all);
    if args.json {
        let shown: Vec<_> = shown.map(|(_, listed)| listed).collect();
        serde_json::to_writer(&mut *out, &json!({ "agents": shown }))?;
        writeln!(out)?;
    } else {
        print_agents(shown, hidden, out)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl AgentsArgs {
    fn list_agents<'a>(
        &self,
        catalog: &'a AgentCatalog,
    ) -> anyhow::Result<Vec<(&'a AgentDefinition, AgentSummary)>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // The checks are the same as those of a run, so that the list and a run agree.
        let machine = HostCapabilities {
            docker_socket: self.places.docker_socket.clone(),
            driver: DriverChoice::Auto,
            init: resolve_init_binary(self.init.clone(), self.state.path())?,
            // The listing assumes the strict default; `--allow-unlimited` is a flag of a run.
            may_be_unlimited: false,
        };
        let listed = catalog.entries().map(|entry| {
            let available = runtime.block_on(check_available(entry, &machine));
            (&**entry, AgentSummary::new(entry, &available))
        });
        Ok(listed.collect())
    }
}

fn print_agents<'a>(
    shown: impl Iterator<Item = (&'a AgentDefinition, AgentSummary)>,
    hidden: usize,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    for (entry, listed) in shown {
        let AgentSummary { agent_id, version, description, models, relay_rules, reason, .. } =
            listed;
        writeln!(out, "{agent_id:20} version {version}, {}", describe_requirements(entry))?;
        writeln!(out, "{:20} {description}", "")?;
        if !models.is_empty() {
            writeln!(out, "{:20} models: {}", "", models.join(", "))?;
        }
        if !relay_rules.is_empty() {
            let rules = relay_rules.join(", ");
            writeln!(out, "{:20} its own relay rules: {rules}", "")?;
        }
        if let Some(reason) = reason {
            writeln!(out, "{:20} cannot run here: {reason}", "")?;
        }
    }
    match hidden {
        0 => (),
        1 => writeln!(out, "1 more cannot run here; `--all` shows it, and why")?,
        hidden => writeln!(out, "{hidden} more cannot run here; `--all` shows them, and why")?,
    }
    Ok(())
}

fn describe_requirements(entry: &AgentDefinition) -> String {
    match (&entry.image, &entry.rootfs) {
        (Some(image), _) => format!("needs the image `{image}`"),
        (None, Some(root)) => format!("needs the root `{}`", Path::display(root)),
        (None, None) => "runs in any image, and without one".to_owned(),
    }
}
