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

use super::agent::place;
use super::{Agent, Message, Order};
use crate::base::{serde_words, trace};
use crate::budget;
use crate::catalog::{Catalog, Entry, Maker, Setup};
use crate::config::Config;
use crate::sandbox::First;
use crate::sandbox::spec::{Access, Mount, Root, UID, Volume, Wanted, Workspace};
use crate::sandbox::{self, RunSpec, UserRange, embedded};

/// One run, as far as somebody has said. Paths that are not absolute begin at the current directory.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// The run's id; one is made where nobody says.
    pub run: Option<String>,
    /// An agent of the catalog, in place of `argv`.
    pub agent: Option<String>,
    /// What the agent is to answer: the only message of a user.
    pub message: Option<String>,
    /// What the agent is to answer: all that was said.
    pub messages: Vec<Message>,
    pub driver: Option<Maker>,
    /// Whether the embedded driver may do without limits on memory, processes and processors.
    pub allow_unlimited: Option<bool>,
    /// The image, by name or id.
    pub image: Option<String>,
    /// An unpacked root in place of an image.
    pub rootfs: Option<PathBuf>,
    /// The program and its arguments, executed as they stand.
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub limits: Wanted,
    #[serde(deserialize_with = "workspace")]
    pub workspace: Option<Workspace>,
    /// What the sandbox is given of this machine has to be below one of these.
    pub roots: Vec<PathBuf>,
    pub mounts: Vec<Mount>,
    pub volumes: Vec<Volume>,
    /// Between SIGTERM and SIGKILL.
    #[serde(with = "humantime_serde")]
    pub grace: Option<Duration>,
    pub llm: Llm,
}

/// What the run's gateway is told; its other settings are those of the gateway's own configuration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Llm {
    /// The billing account.
    pub account: Option<String>,
    pub attempt: Option<String>,
    pub metadata: Option<Map<String, Value>>,
    /// The span that the run is part of, as a W3C `traceparent`.
    pub traceparent: Option<trace::Context>,
    /// The model's name, which the program finds in `COGNI_MODEL`.
    pub model: Option<String>,
    /// The models that there are, for an agent that is to know; those that its entry allows come before them.
    pub models: Vec<String>,
    pub budget: budget::Limits,
}

/// What this machine has, beside what is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub docker_socket: PathBuf,
    /// Where runs have their directories.
    pub run_dir: PathBuf,
    /// What sandboxes have as their first process.
    pub init: First,
    /// The users of this machine that sandboxes run as.
    pub uids: UserRange,
}

impl Request {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or says what is not understood; the error shows where.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read `{shown}`"))?;
        toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            anyhow!("{shown}:{line}: this is no run: {}", serde_words::of_toml(&error))
        })
    }

    /// What is said here, and where nothing is, what is said there.
    #[must_use]
    pub fn over(mut self, below: Self) -> Self {
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
            limits: self.limits.or(below.limits),
            workspace: self.workspace.or(below.workspace),
            roots: if self.roots.is_empty() { below.roots } else { self.roots },
            mounts: if self.mounts.is_empty() { below.mounts } else { self.mounts },
            volumes: if self.volumes.is_empty() { below.volumes } else { self.volumes },
            grace: self.grace.or(below.grace),
            llm: self.llm.over(below.llm),
            ..self
        }
    }

    /// Tells the gateway's configuration what it is told here.
    pub fn configure(&self, config: &mut Config) {
        let Llm { account, attempt, metadata, traceparent, budget, .. } = &self.llm;
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
        config.budget = budget.clone().or(&config.budget);
    }

    /// The whole, the defaults in the gaps, with an agent of the `catalog` where one is named.
    ///
    /// # Errors
    /// What does not fit together.
    pub fn order(mut self, config: Config, host: Host, catalog: &Catalog) -> anyhow::Result<Order> {
        let messages = self.conversation()?;
        match self.agent.as_deref().map(|name| catalog.find(name)).transpose()?.cloned() {
            Some(entry) => self.order_agent(entry, messages, config, host),
            None if messages.is_empty() => {
                let spec = self.spec(&config, &host)?;
                self.order_of(config, host, spec, None)
            }
            None => bail!("`--message` is for an agent; name one with `--agent`"),
        }
    }

    fn conversation(&mut self) -> anyhow::Result<Vec<Message>> {
        let messages = mem::take(&mut self.messages);
        match self.message.take() {
            None => Ok(messages),
            Some(message) if messages.is_empty() => Ok(vec![Message::user(message)]),
            Some(_) => bail!("both a message and messages are given; give one of them"),
        }
    }

    /// What the agent's entry says goes where nothing else is said, but what it allows at most holds in any case.
    fn order_agent(
        mut self,
        entry: Arc<Entry>,
        messages: Vec<Message>,
        mut config: Config,
        host: Host,
    ) -> anyhow::Result<Order> {
        if !self.argv.is_empty() {
            bail!("both an agent and a program are given; give one of them");
        }
        if self.image.is_none() && self.rootfs.is_none() {
            (self.image, self.rootfs) = (entry.image.clone(), entry.rootfs.clone());
            // Whoever writes the catalog decides what it shows of this machine.
            if let Some(root) = &entry.rootfs {
                self.roots = self.roots().chain([root.clone()]).collect();
            }
        }
        self.driver = self.driver.or(Some(entry.driver).filter(|maker| *maker != Maker::Auto));
        self.limits = self.limits.or(entry.limits);
        let model = entry.model(self.env.get(MODEL).or(self.llm.model.as_ref()).cloned());
        let Some(model) = model.map_err(anyhow::Error::msg)? else {
            bail!(
                "no model is named, and the agent has none of its own: name one with `--model` or `{MODEL}`"
            );
        };
        let mut env = entry.env.clone();
        env.extend(mem::take(&mut self.env));
        self.env = env;
        self.llm.model = Some(model.clone());
        let metadata = &mut config.identity.metadata;
        metadata.entry("graph_id").or_insert_with(|| entry.graph().into());
        entry.lay_over(&mut config.policy)?;
        config.budget = config.budget.within(&entry.budget);
        let mut spec = self.spec(&config, &host)?;
        let longest = config.budget.deadline.unwrap_or(spec.limits.max_runtime);
        let timeout = Entry::own_time(spec.limits.max_runtime.min(longest));
        let models = match &config.policy.body.models {
            known if known.is_empty() => mem::take(&mut self.llm.models),
            known => known.clone(),
        };
        let agent = Agent { entry, messages, model, models, timeout };
        spec.argv = agent.argv(&spec.run)?;
        check_agent(&agent, &spec)?;
        self.order_of(config, host, spec, Some(agent))
    }

    /// The sandbox, as far as it is said here.
    fn spec(&mut self, config: &Config, host: &Host) -> anyhow::Result<RunSpec> {
        let model = self.llm.model.clone().map(|model| (MODEL.to_owned(), model));
        let mut env: BTreeMap<_, _> = model.into_iter().collect();
        env.extend(mem::take(&mut self.env));
        let root = root(self.image.take(), self.rootfs.take())?;
        let init = host.init.file()?;
        Ok(RunSpec {
            run: config.identity.run.clone(),
            root,
            argv: mem::take(&mut self.argv),
            // Until it has a user of its own.
            uid: UID,
            env,
            limits: self.limits.limits(),
            grace: self.grace.unwrap_or(GRACE),
            workspace: made_absolute(self.workspace.take().unwrap_or_default())?,
            mounts: mem::take(&mut self.mounts),
            volumes: mem::take(&mut self.volumes),
            socket_dir: PathBuf::new(),
            init,
            has_gateway: true,
        })
    }

    /// What may be shown of this machine: the current directory, where nothing is said.
    fn roots(&self) -> impl Iterator<Item = PathBuf> {
        let here = self.roots.is_empty().then(|| PathBuf::from("."));
        here.into_iter().chain(self.roots.clone())
    }

    fn order_of(
        self,
        config: Config,
        host: Host,
        spec: RunSpec,
        agent: Option<Agent>,
    ) -> anyhow::Result<Order> {
        let Host { docker_socket, run_dir, uids, .. } = host;
        let driver = driver(self.driver, &spec.root, &docker_socket, self.allow_unlimited);
        let roots = self.roots().map(absolute).collect::<Result<_, _>>()?;
        Ok(Order {
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

impl Llm {
    fn over(self, below: Self) -> Self {
        Self {
            account: self.account.or(below.account),
            attempt: self.attempt.or(below.attempt),
            metadata: self.metadata.or(below.metadata),
            traceparent: self.traceparent.or(below.traceparent),
            model: self.model.or(below.model),
            models: if self.models.is_empty() { below.models } else { self.models },
            budget: self.budget.or(&below.budget),
        }
    }
}

fn root(image: Option<String>, rootfs: Option<PathBuf>) -> anyhow::Result<Root> {
    match (image, rootfs) {
        (Some(image), None) => Ok(Root::Image(image)),
        (None, Some(path)) => Ok(Root::Directory(absolute(path)?)),
        (None, None) => Ok(Root::Host),
        (Some(image), Some(path)) => {
            bail!("the image is `{image}`, the root `{}`; give one of them", path.display())
        }
    }
}

fn driver(
    maker: Option<Maker>,
    root: &Root,
    docker_socket: &Path,
    allow_unlimited: Option<bool>,
) -> sandbox::Driver {
    let is_docker = match maker.unwrap_or_default() {
        Maker::Auto => matches!(root, Root::Image(_)),
        Maker::Docker => true,
        Maker::Embedded => false,
    };
    if is_docker {
        return sandbox::Driver::Docker { socket: docker_socket.to_owned() };
    }
    sandbox::Driver::Embedded(embedded::Settings {
        may_be_unlimited: allow_unlimited.unwrap_or_default(),
        ..embedded::Settings::default()
    })
}

fn made_absolute(workspace: Workspace) -> anyhow::Result<Workspace> {
    Ok(match workspace {
        same @ (Workspace::None | Workspace::Fresh) => same,
        Workspace::Directory { path, access } => Workspace::Directory {
            path: absolute(path).context("the workspace has no path")?,
            access,
        },
    })
}

/// What an agent needs of its sandbox.
fn check_agent(agent: &Agent, spec: &RunSpec) -> anyhow::Result<()> {
    let Agent { entry, messages, .. } = agent;
    let Entry { name, setup, program, .. } = &**entry;
    if program.is_some() && spec.init.is_none() {
        bail!("the program of `{name}` is in the file of cogni-init; leave out `--init none`");
    }
    if !messages.is_empty() && agent.last().is_none() {
        bail!("none of the messages is a user's; there is nothing to answer");
    }
    let place = place(*setup);
    match &spec.workspace {
        Workspace::None | Workspace::Fresh if messages.is_empty() => bail!(
            "there is nothing to answer; give `--message`, or a workspace with `{place}` in it"
        ),
        Workspace::Directory { path, access: Access::ReadOnly } if !messages.is_empty() => bail!(
            "the workspace is read-only, and the message is to stand in `{place}`; say `--workspace {}:rw`, \
             or write that file and leave `--message` out",
            path.display()
        ),
        Workspace::Directory { path, access: Access::ReadOnly } if *setup == Setup::OpenClaw => {
            bail!(
                "the workspace is read-only, and `{name}` keeps its state there; say `--workspace {}:rw`",
                path.display()
            )
        }
        _ => Ok(()),
    }
}

fn workspace<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Workspace>, D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Directory {
        path: PathBuf,
        #[serde(default)]
        access: Access,
    }
    let Directory { path, access } = Directory::deserialize(deserializer)?;
    Ok(Some(Workspace::Directory { path, access }))
}

/// Where a program finds its model's name.
pub const MODEL: &str = "COGNI_MODEL";

const GRACE: Duration = Duration::from_secs(10);
