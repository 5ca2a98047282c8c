//! A request for a run, whose fields may be absent. Flags, a file and the agent's entry in the catalog each make a part
//! of the request. The parts together make a plan.

use std::collections::BTreeMap;
use std::mem;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::agent::input_path;
use super::conversation::MODEL_VARIABLE;
use super::tool_opener::{connection_variables, has_tunnels};
use super::{AgentInvocation, ChatMessage, ChatRole, GatewayServer, RunPlan};
use crate::base::regular_file::read_regular_file;
use crate::base::{serde_words, trace_context};
use crate::gateway::config::GatewayConfig;
use crate::llm::budget;
use crate::runner::agents::{AgentCatalog, AgentDefinition, DriverChoice, WorkspaceSetup};
use crate::runner::branch_delivery::BranchRequest;
use crate::sandbox::InitBinary;
use crate::sandbox::spec::{
    BindMount, LimitOverrides, MountAccess, RootSource, SANDBOX_UID, SandboxTask, VolumeMount,
    WorkspaceMount,
};
use crate::sandbox::{self, SandboxSpec, UserRange, embedded};
use crate::tools::agent_modes::WorkspaceMode;

/// A request for one run, with optional fields; [`RunRequest::resolve`] makes the run's plan from it. Relative paths
/// begin at the current directory.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunRequest {
    /// The run's ID. If absent, the run gets the ID of the gateway's configuration.
    pub run: Option<String>,
    /// The name of an agent of the catalog, in place of `argv`.
    pub agent: Option<String>,
    /// The only message of the conversation, from a user.
    pub message: Option<String>,
    /// The messages of the whole conversation.
    pub messages: Vec<ChatMessage>,
    pub driver: Option<DriverChoice>,
    /// True if the embedded driver may run a sandbox without limits on memory, processes and processors.
    pub allow_unlimited: Option<bool>,
    /// The image's name or ID.
    pub image: Option<String>,
    /// The directory of an unpacked root file system, in place of an image.
    pub rootfs: Option<PathBuf>,
    /// The program and its arguments, which are executed unchanged.
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub limits: LimitOverrides,
    #[serde(deserialize_with = "deserialize_workspace")]
    pub workspace: Option<WorkspaceMount>,
    /// The directories of this machine that the sandbox may mount from. Every host path of the sandbox has to be below
    /// one of these directories.
    pub roots: Vec<PathBuf>,
    pub mounts: Vec<BindMount>,
    pub volumes: Vec<VolumeMount>,
    /// The time between SIGTERM and SIGKILL.
    #[serde(with = "humantime_serde")]
    pub grace: Option<Duration>,
    pub llm: GatewayOverrides,
    /// The branch that the work is for. A file cannot name a branch.
    #[serde(skip)]
    pub branch: Option<BranchRequest>,
}

/// The settings of the run's gateway that a request may change. The gateway's own configuration has the other settings.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayOverrides {
    /// The billing account.
    pub account: Option<String>,
    pub attempt: Option<String>,
    pub metadata: Option<Map<String, Value>>,
    /// The span that the run is part of, as a W3C `traceparent`.
    pub traceparent: Option<trace_context::TraceContext>,
    /// The model's name, which the program finds in `COGNI_MODEL`.
    pub model: Option<String>,
    /// The models that an agent's settings list, unless the gateway's policy or the agent's entry restricts the models.
    pub models: Vec<String>,
    pub budget: budget::BudgetLimits,
}

/// The properties of this machine that a plan needs beside the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostEnvironment {
    pub docker_socket: PathBuf,
    /// The parent of the runs' directories.
    pub run_dir: PathBuf,
    /// The first process of the sandboxes.
    pub init: InitBinary,
    /// The users of this machine that sandboxes run as.
    pub uids: UserRange,
}

impl RunRequest {
    /// Returns the last message of the user. Empty if the workspace holds the conversation.
    pub fn user_text(&self) -> String {
        let mut all = self.messages.iter().rev();
        let last = all.find(|message| message.role == ChatRole::User);
        let text = self.message.as_ref().or(last.map(|message| &message.content));
        text.cloned().unwrap_or_default()
    }

    /// Reads a request from a TOML file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or parsed. The error contains the path and the line.
    pub fn from_file(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let text = read_regular_file(path, MAX_REQUEST_BYTES);
        let text = text.with_context(|| format!("cannot read `{shown}`"))?;
        toml::from_str(&text).map_err(|error| {
            let line = serde_words::toml_line(&text, &error);
            anyhow!("{shown}:{line}: this is no run: {}", serde_words::of_toml(&error))
        })
    }

    /// Returns this request, with the fields of `below` in place of absent fields.
    #[must_use]
    pub fn with_defaults(mut self, below: Self) -> Self {
        // The fields of each pair exclude each other. A pair is taken from one request as a whole: an image here must
        // not meet a root directory from `below`.
        if self.image.is_none() && self.rootfs.is_none() {
            (self.image, self.rootfs) = (below.image, below.rootfs);
        }
        if self.agent.is_none() && self.argv.is_empty() {
            (self.agent, self.argv) = (below.agent, below.argv);
        }
        if self.message.is_none() && self.messages.is_empty() {
            (self.message, self.messages) = (below.message, below.messages);
        }
        let mut env = below.env;
        env.extend(self.env);
        Self {
            run: self.run.or(below.run),
            driver: self.driver.or(below.driver),
            allow_unlimited: self.allow_unlimited.or(below.allow_unlimited),
            env,
            limits: self.limits.with_defaults(below.limits),
            workspace: self.workspace.or(below.workspace),
            roots: if self.roots.is_empty() { below.roots } else { self.roots },
            mounts: if self.mounts.is_empty() { below.mounts } else { self.mounts },
            volumes: if self.volumes.is_empty() { below.volumes } else { self.volumes },
            grace: self.grace.or(below.grace),
            llm: self.llm.with_defaults(below.llm),
            ..self
        }
    }

    /// Returns the plan of the run, with defaults for absent fields, and with the named agent of the `catalog`.
    ///
    /// # Errors
    /// Returns an error if fields contradict each other, if the agent is unknown, or if the agent lacks something that
    /// it needs.
    pub fn resolve(
        mut self,
        (mut config, gateway): (GatewayConfig, GatewayServer),
        host: HostEnvironment,
        catalog: &AgentCatalog,
    ) -> anyhow::Result<RunPlan> {
        let messages = self.take_conversation()?;
        let entry = self.agent.as_deref().map(|name| catalog.find_agent(name)).transpose()?;
        let (spec, agent) = match entry.cloned() {
            Some(entry) => {
                let (spec, agent) = self.resolve_agent(entry, messages, &mut config, &host)?;
                (spec, Some(agent))
            }
            None if messages.is_empty() => (self.sandbox_spec(&config, &host)?, None),
            None => bail!("`--message` is for an agent; name one with `--agent`"),
        };
        let roots = self.allowed_roots().map(absolute).collect::<Result<_, _>>()?;
        let HostEnvironment { docker_socket, run_dir, uids, .. } = host;
        let driver = select_driver(self.driver, &spec.root, &docker_socket, self.allow_unlimited);
        Ok(RunPlan {
            config,
            gateway,
            spec,
            agent,
            branch: self.branch,
            roots,
            run_dir,
            uids,
            driver,
            docker_socket,
        })
    }

    fn take_conversation(&mut self) -> anyhow::Result<Vec<ChatMessage>> {
        let messages = mem::take(&mut self.messages);
        match self.message.take() {
            None => Ok(messages),
            Some(message) if messages.is_empty() => Ok(vec![ChatMessage::user(message)]),
            Some(_) => bail!("both a message and messages are given; give one of them"),
        }
    }

    /// Returns the sandbox and the agent of an agent's run. The agent's entry fills absent fields, and the entry's
    /// limits bound the request and the gateway's configuration in any case.
    fn resolve_agent(
        &mut self,
        entry: Arc<AgentDefinition>,
        messages: Vec<ChatMessage>,
        config: &mut GatewayConfig,
        host: &HostEnvironment,
    ) -> anyhow::Result<(SandboxSpec, AgentInvocation)> {
        if !self.argv.is_empty() {
            bail!("both an agent and a program are given; give one of them");
        }
        if self.image.is_none() && self.rootfs.is_none() {
            (self.image, self.rootfs) = (entry.image.clone(), entry.rootfs.clone());
            // The operator writes the catalog, so its root directory needs no other permission. The request's own roots
            // stay: they are made explicit here, because an empty list means the current directory.
            if let Some(root) = &entry.rootfs {
                self.roots = self.allowed_roots().chain([root.clone()]).collect();
            }
        }
        self.driver =
            self.driver.or(Some(entry.driver).filter(|maker| *maker != DriverChoice::Auto));
        self.limits = self.limits.with_defaults(entry.limits);
        let model =
            entry.select_model(self.env.get(MODEL_VARIABLE).or(self.llm.model.as_ref()).cloned());
        let Some(model) = model.map_err(anyhow::Error::msg)? else {
            bail!(
                "no model is named, and the agent has none of its own: name one with `--model` or `{MODEL_VARIABLE}`"
            );
        };
        // The request's variables replace those of the entry.
        let mut env = entry.env.clone();
        env.extend(mem::take(&mut self.env));
        self.env = env;
        self.llm.model = Some(model.clone());
        entry.lay_over(config)?;
        let mut spec = self.sandbox_spec(config, host)?;
        // The agent's own timeout follows from the earlier of the two deadlines, the sandbox's and the budget's.
        let longest = config.budget.deadline.unwrap_or(spec.limits.max_runtime);
        let timeout = AgentDefinition::agent_timeout(spec.limits.max_runtime.min(longest));
        let models = match &config.policy.body.models {
            known if known.is_empty() => mem::take(&mut self.llm.models),
            known => known.clone(),
        };
        if entry.modes.workspace == WorkspaceMode::None && self.branch.is_some() {
            bail!(
                "`modes.workspace` of `{}` is `none`, so there is no place for a repository; give no repository",
                entry.name
            );
        }
        let agent = AgentInvocation { entry, messages, model, models, timeout };
        spec.argv = agent.argv(&spec.run)?;
        check_agent(&agent, &spec)?;
        Ok((spec, agent))
    }

    /// Builds the sandbox's specification from the request. Moves the used fields out of the request.
    fn sandbox_spec(
        &mut self,
        config: &GatewayConfig,
        host: &HostEnvironment,
    ) -> anyhow::Result<SandboxSpec> {
        let model = self.llm.model.clone().map(|model| (MODEL_VARIABLE.to_owned(), model));
        // The request's variables replace those of connections.
        let mut env = connection_variables(&config.tools)?;
        env.extend(model);
        env.extend(mem::take(&mut self.env));
        let root = select_root(self.image.take(), self.rootfs.take())?;
        let init = host.init.install_file()?;
        Ok(SandboxSpec {
            run: config.identity.run.clone(),
            root,
            argv: mem::take(&mut self.argv),
            // A placeholder: the run's directory or workspace decides the user later.
            uid: SANDBOX_UID,
            env,
            limits: self.limits.resolve_limits(),
            grace: self.grace.unwrap_or(DEFAULT_GRACE),
            workspace: absolute_workspace(self.workspace.take().unwrap_or_default())?,
            mounts: mem::take(&mut self.mounts),
            volumes: mem::take(&mut self.volumes),
            socket_dir: PathBuf::new(),
            init,
            has_tunnels: has_tunnels(&config.tools)?,
            task: SandboxTask::Agent,
        })
    }

    /// Returns the directories that the sandbox may mount from: the request's roots, or else the current directory.
    fn allowed_roots(&self) -> impl Iterator<Item = PathBuf> {
        let current_dir = self.roots.is_empty().then(|| PathBuf::from("."));
        current_dir.into_iter().chain(self.roots.clone())
    }
}

impl GatewayOverrides {
    /// Writes these settings and the run's ID, if the ID is given, into the gateway's configuration.
    pub fn apply_to_config(&self, run: Option<&str>, config: &mut GatewayConfig) {
        let identity = &mut config.identity;
        let texts = [
            (&mut identity.run, run),
            (&mut identity.account, self.account.as_deref()),
            (&mut identity.attempt, self.attempt.as_deref()),
        ];
        for (to, from) in texts {
            if let Some(from) = from {
                from.clone_into(to);
            }
        }
        if let Some(metadata) = &self.metadata {
            identity.metadata.clone_from(metadata);
        }
        identity.trace = self.traceparent.or(identity.trace);
        config.budget = self.budget.clone().or_defaults(&config.budget);
    }

    fn with_defaults(self, below: Self) -> Self {
        Self {
            account: self.account.or(below.account),
            attempt: self.attempt.or(below.attempt),
            metadata: self.metadata.or(below.metadata),
            traceparent: self.traceparent.or(below.traceparent),
            model: self.model.or(below.model),
            models: if self.models.is_empty() { below.models } else { self.models },
            budget: self.budget.or_defaults(&below.budget),
        }
    }
}

fn select_root(image: Option<String>, rootfs: Option<PathBuf>) -> anyhow::Result<RootSource> {
    match (image, rootfs) {
        (Some(image), None) => Ok(RootSource::Image(image)),
        (None, Some(path)) => Ok(RootSource::Directory(absolute(path)?)),
        (None, None) => Ok(RootSource::Host),
        (Some(image), Some(path)) => {
            bail!("the image is `{image}`, the root `{}`; give one of them", path.display())
        }
    }
}

fn select_driver(
    maker: Option<DriverChoice>,
    root: &RootSource,
    docker_socket: &Path,
    allow_unlimited: Option<bool>,
) -> sandbox::SandboxDriver {
    // Only Docker Engine has images. The embedded driver takes a directory, or this machine's own programs.
    let is_docker = match maker.unwrap_or_default() {
        DriverChoice::Auto => matches!(root, RootSource::Image(_)),
        DriverChoice::Docker => true,
        DriverChoice::Embedded => false,
    };
    if is_docker {
        return sandbox::SandboxDriver::Docker { socket: docker_socket.to_owned() };
    }
    sandbox::SandboxDriver::Embedded(embedded::EmbeddedDriverConfig {
        may_be_unlimited: allow_unlimited.unwrap_or_default(),
        ..embedded::EmbeddedDriverConfig::default()
    })
}

fn absolute_workspace(workspace: WorkspaceMount) -> anyhow::Result<WorkspaceMount> {
    Ok(match workspace {
        same @ (WorkspaceMount::None | WorkspaceMount::Fresh) => same,
        WorkspaceMount::Directory { path, access } => WorkspaceMount::Directory {
            path: absolute(path).context("the workspace has no path")?,
            access,
        },
    })
}

/// Checks that the sandbox has what the agent needs: its program, its input and a workspace that it may write to.
fn check_agent(agent: &AgentInvocation, spec: &SandboxSpec) -> anyhow::Result<()> {
    let AgentInvocation { entry, messages, .. } = agent;
    let AgentDefinition { name, setup, program, .. } = &**entry;
    if program.is_some() && spec.init.is_none() {
        bail!("the program of `{name}` is in the file of cogni-init; leave out `--init none`");
    }
    if !messages.is_empty() && agent.last_user_message().is_none() {
        bail!("none of the messages is a user's; there is nothing to answer");
    }
    let input_file = input_path(*setup);
    if entry.modes.workspace == WorkspaceMode::None {
        if spec.workspace != WorkspaceMount::None {
            bail!("`modes.workspace` of `{name}` is `none`; give no `--workspace`");
        }
        if messages.is_empty() {
            bail!("there is nothing to answer; give `--message`");
        }
        return Ok(());
    }
    match &spec.workspace {
        WorkspaceMount::None | WorkspaceMount::Fresh if messages.is_empty() => bail!(
            "there is nothing to answer; give `--message`, or a workspace with `{input_file}` in it"
        ),
        WorkspaceMount::Directory { path, access: MountAccess::ReadOnly }
            if !messages.is_empty() =>
        {
            bail!(
                "the workspace is read-only, and the message is to stand in `{input_file}`; say `--workspace {}:rw`, \
             or write that file and leave `--message` out",
                path.display()
            )
        }
        WorkspaceMount::Directory { path, access: MountAccess::ReadOnly }
            if *setup == WorkspaceSetup::OpenClaw =>
        {
            bail!(
                "the workspace is read-only, and `{name}` keeps its state there; say `--workspace {}:rw`",
                path.display()
            )
        }
        _ => Ok(()),
    }
}

fn deserialize_workspace<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<WorkspaceMount>, D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct WorkspaceDirectory {
        path: PathBuf,
        #[serde(default)]
        access: MountAccess,
    }
    let WorkspaceDirectory { path, access } = WorkspaceDirectory::deserialize(deserializer)?;
    Ok(Some(WorkspaceMount::Directory { path, access }))
}

/// The default time between SIGTERM and SIGKILL (our choice).
const DEFAULT_GRACE: Duration = Duration::from_secs(10);

/// The largest file that describes a run, and the largest message on standard input, in bytes. Our choice: four times the longest
/// message (4 MiB, for OpenClaw), so that a message that is too long is told as such.
pub const MAX_REQUEST_BYTES: u64 = 16 << 20;
