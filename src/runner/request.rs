//! What is asked for, with gaps: by flags, by a file, by an agent's entry in the catalog. Together they make an order.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf, absolute};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::{Agent, Order};
use crate::budget;
use crate::catalog::{self, Entry};
use crate::config::Config;
use crate::sandbox::spec::{Access, Mount, Root, Volume, Wanted, Workspace};
use crate::sandbox::{self, RunSpec, embedded};

/// One run, as far as somebody has said. Paths that are not absolute begin at the current directory.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// The run's id; one is made where nobody says.
    pub run: Option<String>,
    /// An agent of the catalog, in place of `argv`.
    pub agent: Option<String>,
    /// What the agent is to answer.
    pub message: Option<String>,
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
    /// The model's name, which the program finds in `COGNI_MODEL`.
    pub model: Option<String>,
    pub budget: budget::Limits,
}

/// Who makes the sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Maker {
    /// Docker Engine where there is an image, else we ourselves.
    #[default]
    Auto,
    Docker,
    Embedded,
}

/// What this machine has, beside what is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub docker_socket: PathBuf,
    /// Where runs have their directories.
    pub run_dir: PathBuf,
    /// The sandbox's first process.
    pub init: Option<PathBuf>,
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
            anyhow::Error::new(error).context(format!("{shown}:{line}: this is no run"))
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
        let mut env = below.env;
        env.extend(self.env);
        Self {
            run: self.run.or(below.run),
            message: self.message.or(below.message),
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
        let Llm { account, attempt, metadata, budget, .. } = &self.llm;
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
        config.budget = budget.clone().or(&config.budget);
    }

    /// The whole, the defaults in the gaps.
    ///
    /// # Errors
    /// What does not fit together.
    pub fn order(self, config: Config, host: Host) -> anyhow::Result<Order> {
        let entry = self.agent.as_deref().map(catalog::find).transpose()?;
        if entry.is_some() && !self.argv.is_empty() {
            bail!("both an agent and a program are given; give one of them");
        }
        if entry.is_none() && self.message.is_some() {
            bail!("`--message` is for an agent; name one with `--agent`");
        }
        let image =
            self.image.or_else(|| entry.as_ref()?.image.clone().filter(|_| self.rootfs.is_none()));
        let root = root(image, self.rootfs)?;
        let driver = driver(self.driver, &root, host.docker_socket, self.allow_unlimited);
        let limits = entry.as_ref().map_or(self.limits, |entry| self.limits.or(entry.limits));
        let mut env = entry.as_ref().map(|entry| entry.env.clone()).unwrap_or_default();
        env.extend(self.llm.model.clone().map(|model| (MODEL.to_owned(), model)));
        env.extend(self.env);
        if entry.is_some() && !env.contains_key(MODEL) {
            bail!("no model is named; an agent needs one, by `--model` or `{MODEL}`");
        }
        let agent = entry.map(|entry| Agent { entry, message: self.message });
        let spec = RunSpec {
            run: config.identity.run.clone(),
            root,
            argv: agent.as_ref().map_or(self.argv, |agent| agent.entry.argv.clone()),
            env,
            limits: limits.limits(),
            workspace: made_absolute(self.workspace.unwrap_or_default())?,
            mounts: self.mounts,
            volumes: self.volumes,
            socket_dir: PathBuf::new(),
            init: host.init,
        };
        check_agent(agent.as_ref(), &spec)?;
        let roots = if self.roots.is_empty() { vec![PathBuf::from(".")] } else { self.roots };
        let roots = roots.into_iter().map(absolute).collect::<Result<_, _>>()?;
        let grace = self.grace.unwrap_or(GRACE);
        let run_dir = host.run_dir;
        Ok(Order {
            config,
            spec,
            agent,
            target: None,
            roots,
            run_dir,
            driver,
            proxy: None,
            seats: None,
            grace,
        })
    }
}

impl Llm {
    fn over(self, below: Self) -> Self {
        Self {
            account: self.account.or(below.account),
            attempt: self.attempt.or(below.attempt),
            metadata: self.metadata.or(below.metadata),
            model: self.model.or(below.model),
            budget: self.budget.or(&below.budget),
        }
    }
}

impl FromStr for Maker {
    type Err = &'static str;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        match given {
            "auto" => Ok(Self::Auto),
            "docker" => Ok(Self::Docker),
            "embedded" => Ok(Self::Embedded),
            _ => Err("give auto, docker or embedded"),
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
    docker_socket: PathBuf,
    allow_unlimited: Option<bool>,
) -> sandbox::Driver {
    let is_docker = match maker.unwrap_or_default() {
        Maker::Auto => matches!(root, Root::Image(_)),
        Maker::Docker => true,
        Maker::Embedded => false,
    };
    if is_docker {
        return sandbox::Driver::Docker { socket: docker_socket };
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
fn check_agent(agent: Option<&Agent>, spec: &RunSpec) -> anyhow::Result<()> {
    let Some(Agent { entry, message }) = agent else { return Ok(()) };
    let Entry { name, conversation, program, .. } = entry;
    if program.is_some() && spec.init.is_none() {
        bail!(
            "the program of `{name}` is in the file of cogni-init; say with `--init` where that is"
        );
    }
    let place = conversation.display();
    match (&spec.workspace, message) {
        (Workspace::None | Workspace::Fresh, None) => {
            bail!(
                "there is nothing to answer; give `--message`, or a workspace with `{place}` in it"
            )
        }
        (Workspace::Directory { path, access: Access::ReadOnly }, Some(_)) => bail!(
            "the workspace is read-only, and the message is to stand in `{place}`; say `--workspace {}:rw`, \
             or write that file and leave `--message` out",
            path.display()
        ),
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
