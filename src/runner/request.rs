//! What is asked for, with gaps: by flags, by a file, by an agent's entry in the catalog. Together they make an order.

use std::collections::BTreeMap;
use std::fs;
use std::mem;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::agent::input_path;
use super::{AgentInvocation, ChatMessage, RunPlan};
use crate::base::{serde_words, trace_context};
use crate::gateway::config::GatewayConfig;
use crate::llm::budget;
use crate::runner::agents::{AgentCatalog, AgentDefinition, DriverChoice, WorkspaceSetup};
use crate::sandbox::InitBinary;
use crate::sandbox::spec::{
    BindMount, LimitOverrides, MountAccess, RootSource, SANDBOX_UID, VolumeMount, WorkspaceMount,
};
use crate::sandbox::{self, SandboxSpec, UserRange, embedded};

/// One run, as far as somebody has said. Paths that are not absolute begin at the current directory.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunRequest {
    /// The run's id; one is made where nobody says.
    pub run: Option<String>,
    /// An agent of the catalog, in place of `argv`.
    pub agent: Option<String>,
    /// What the agent is to answer: the only message of a user.
    pub message: Option<String>,
    /// What the agent is to answer: all that was said.
    pub messages: Vec<ChatMessage>,
    pub driver: Option<DriverChoice>,
    /// Whether the embedded driver may do without limits on memory, processes and processors.
    pub allow_unlimited: Option<bool>,
    /// The image, by name or id.
    pub image: Option<String>,
    /// An unpacked root in place of an image.
    pub rootfs: Option<PathBuf>,
    /// The program and its arguments, executed as they stand.
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub limits: LimitOverrides,
    #[serde(deserialize_with = "deserialize_workspace")]
    pub workspace: Option<WorkspaceMount>,
    /// What the sandbox is given of this machine has to be below one of these.
    pub roots: Vec<PathBuf>,
    pub mounts: Vec<BindMount>,
    pub volumes: Vec<VolumeMount>,
    /// Between SIGTERM and SIGKILL.
    #[serde(with = "humantime_serde")]
    pub grace: Option<Duration>,
    pub llm: GatewayOverrides,
}

/// What the run's gateway is told; its other settings are those of the gateway's own configuration.
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
    /// The models that there are, for an agent that is to know; those that its entry allows come before them.
    pub models: Vec<String>,
    pub budget: budget::BudgetLimits,
}

/// What this machine has, beside what is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostEnvironment {
    pub docker_socket: PathBuf,
    /// Where runs have their directories.
    pub run_dir: PathBuf,
    /// What sandboxes have as their first process.
    pub init: InitBinary,
    /// The users of this machine that sandboxes run as.
    pub uids: UserRange,
}

impl RunRequest {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or says what is not understood; the error shows where.
    pub fn from_file(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read `{shown}`"))?;
        toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            anyhow!("{shown}:{line}: this is no run: {}", serde_words::of_toml(&error))
        })
    }

    /// What is said here, and where nothing is, what is said there.
    #[must_use]
    pub fn with_defaults(mut self, below: Self) -> Self {
        // Who names one of these has chosen against the others.
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

    /// Tells the gateway's configuration what it is told here.
    pub fn apply_to_config(&self, config: &mut GatewayConfig) {
        let GatewayOverrides { account, attempt, metadata, traceparent, budget, .. } = &self.llm;
        let identity = &mut config.identity;
        let set = |to: &mut String, from: &Option<String>| {
            if let Some(from) = from {
                to.clone_from(from);
            }
        };
        set(&mut identity.run, &self.run);
        set(&mut identity.account, account);
        set(&mut identity.attempt, attempt);
        if let Some(metadata) = metadata {
            identity.metadata.clone_from(metadata);
        }
        identity.trace = traceparent.or(identity.trace);
        config.budget = budget.clone().or_defaults(&config.budget);
    }

    /// The whole, the defaults in the gaps, with an agent of the `catalog` where one is named.
    ///
    /// # Errors
    /// What does not fit together.
    pub fn resolve(
        mut self,
        config: GatewayConfig,
        host: HostEnvironment,
        catalog: &AgentCatalog,
    ) -> anyhow::Result<RunPlan> {
        let messages = self.take_conversation()?;
        match self.agent.as_deref().map(|name| catalog.find_agent(name)).transpose()?.cloned() {
            Some(entry) => self.resolve_agent(entry, messages, config, host),
            None if messages.is_empty() => {
                let spec = self.sandbox_spec(&config, &host)?;
                self.build_plan(config, host, spec, None)
            }
            None => bail!("`--message` is for an agent; name one with `--agent`"),
        }
    }

    fn take_conversation(&mut self) -> anyhow::Result<Vec<ChatMessage>> {
        let messages = mem::take(&mut self.messages);
        match self.message.take() {
            None => Ok(messages),
            Some(message) if messages.is_empty() => Ok(vec![ChatMessage::user(message)]),
            Some(_) => bail!("both a message and messages are given; give one of them"),
        }
    }

    /// What the agent's entry says goes where nothing else is said, but what it allows at most holds in any case.
    fn resolve_agent(
        mut self,
        entry: Arc<AgentDefinition>,
        messages: Vec<ChatMessage>,
        mut config: GatewayConfig,
        host: HostEnvironment,
    ) -> anyhow::Result<RunPlan> {
        if !self.argv.is_empty() {
            bail!("both an agent and a program are given; give one of them");
        }
        if self.image.is_none() && self.rootfs.is_none() {
            (self.image, self.rootfs) = (entry.image.clone(), entry.rootfs.clone());
            // Whoever writes the catalog decides what it shows of this machine.
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
        let mut env = entry.env.clone();
        env.extend(mem::take(&mut self.env));
        self.env = env;
        self.llm.model = Some(model.clone());
        let metadata = &mut config.identity.metadata;
        metadata.entry("graph_id").or_insert_with(|| entry.effective_graph_id().into());
        entry.apply_to(&mut config.policy)?;
        config.budget = config.budget.capped_by(&entry.budget);
        let mut spec = self.sandbox_spec(&config, &host)?;
        let longest = config.budget.deadline.unwrap_or(spec.limits.max_runtime);
        let timeout = AgentDefinition::agent_timeout(spec.limits.max_runtime.min(longest));
        let models = match &config.policy.body.models {
            known if known.is_empty() => mem::take(&mut self.llm.models),
            known => known.clone(),
        };
        let agent = AgentInvocation { entry, messages, model, models, timeout };
        spec.argv = agent.argv(&spec.run)?;
        check_agent(&agent, &spec)?;
        self.build_plan(config, host, spec, Some(agent))
    }

    /// The sandbox, as far as it is said here.
    fn sandbox_spec(
        &mut self,
        config: &GatewayConfig,
        host: &HostEnvironment,
    ) -> anyhow::Result<SandboxSpec> {
        let model = self.llm.model.clone().map(|model| (MODEL_VARIABLE.to_owned(), model));
        let mut env: BTreeMap<_, _> = model.into_iter().collect();
        env.extend(mem::take(&mut self.env));
        let root = select_root(self.image.take(), self.rootfs.take())?;
        let init = host.init.install_file()?;
        Ok(SandboxSpec {
            run: config.identity.run.clone(),
            root,
            argv: mem::take(&mut self.argv),
            // Until it has a user of its own.
            uid: SANDBOX_UID,
            env,
            limits: self.limits.resolve_limits(),
            grace: self.grace.unwrap_or(DEFAULT_GRACE),
            workspace: absolute_workspace(self.workspace.take().unwrap_or_default())?,
            mounts: mem::take(&mut self.mounts),
            volumes: mem::take(&mut self.volumes),
            socket_dir: PathBuf::new(),
            init,
            has_gateway: true,
        })
    }

    /// What may be shown of this machine: the current directory, where nothing is said.
    fn allowed_roots(&self) -> impl Iterator<Item = PathBuf> {
        let here = self.roots.is_empty().then(|| PathBuf::from("."));
        here.into_iter().chain(self.roots.clone())
    }

    fn build_plan(
        self,
        config: GatewayConfig,
        host: HostEnvironment,
        spec: SandboxSpec,
        agent: Option<AgentInvocation>,
    ) -> anyhow::Result<RunPlan> {
        let HostEnvironment { docker_socket, run_dir, uids, .. } = host;
        let driver = select_driver(self.driver, &spec.root, &docker_socket, self.allow_unlimited);
        let roots = self.allowed_roots().map(absolute).collect::<Result<_, _>>()?;
        Ok(RunPlan {
            config,
            spec,
            agent,
            target: None,
            roots,
            run_dir,
            uids,
            driver,
            docker_socket,
            proxy: None,
            seats: None,
        })
    }
}

impl GatewayOverrides {
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

/// What an agent needs of its sandbox.
fn check_agent(agent: &AgentInvocation, spec: &SandboxSpec) -> anyhow::Result<()> {
    let AgentInvocation { entry, messages, .. } = agent;
    let AgentDefinition { name, setup, program, .. } = &**entry;
    if program.is_some() && spec.init.is_none() {
        bail!("the program of `{name}` is in the file of cogni-init; leave out `--init none`");
    }
    if !messages.is_empty() && agent.last_user_message().is_none() {
        bail!("none of the messages is a user's; there is nothing to answer");
    }
    let place = input_path(*setup);
    match &spec.workspace {
        WorkspaceMount::None | WorkspaceMount::Fresh if messages.is_empty() => bail!(
            "there is nothing to answer; give `--message`, or a workspace with `{place}` in it"
        ),
        WorkspaceMount::Directory { path, access: MountAccess::ReadOnly }
            if !messages.is_empty() =>
        {
            bail!(
                "the workspace is read-only, and the message is to stand in `{place}`; say `--workspace {}:rw`, \
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

/// Where a program finds its model's name.
pub const MODEL_VARIABLE: &str = "COGNI_MODEL";

const DEFAULT_GRACE: Duration = Duration::from_secs(10);
