//! The settings of a run's tools. The wings of the gateway and of the tools do not know each other: the caller above
//! both gives the gateway a [`ToolOpener`], and the gateway serves the endpoint that the opener makes.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::AgentRun;
use crate::base::host_lookups::HostLookups;
use crate::base::keyed_permits::KeyedPermits;
use crate::base::local_endpoint::LocalEndpoint;
use crate::base::streamed_endpoint::StreamedEndpoint;
use crate::base::task_group::TaskGroup;
use crate::telemetry::metrics::MetricsRegistry;

/// The settings of a run's tools.
#[derive(Clone, Default)]
pub struct ToolSettings {
    /// The table `[tools]` of the configuration. Without the table, the run has no tools.
    pub table: Option<toml::Table>,
    /// The texts of the files that the table names, by their paths, as they were when the configuration was read.
    /// Without them, the files are read when the run opens.
    pub files: Option<Arc<BTreeMap<PathBuf, String>>>,
    /// The part of the agent's file; `None` for a run without an agent of the catalog.
    pub agent: Option<Box<AgentToolSettings>>,
    /// The opener of the run's tools; `None` if the process cannot serve tools.
    pub opener: Option<Arc<dyn ToolOpener>>,
}

/// What the file of a run's agent says about its tools.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AgentToolSettings {
    /// The name of the agent in the catalog. Another name changes nothing about what the agent may do.
    #[serde(skip)]
    pub id: String,
    /// The tools and connections that the agent may use.
    pub tools: Vec<String>,
    /// The table `[modes]`; empty if no mode differs from its default.
    #[serde(skip_serializing_if = "toml::Table::is_empty")]
    pub modes: toml::Table,
}

/// The endpoints of a run's tools and connections.
#[derive(Clone)]
pub struct ToolEndpoints {
    pub tools: Arc<dyn LocalEndpoint>,
    pub connections: Arc<dyn StreamedEndpoint>,
}

/// Makes the endpoints of a run's tools.
pub trait ToolOpener: Send + Sync {
    /// Checks settings without a run.
    ///
    /// # Errors
    /// Returns an error that names the key and the remedy.
    fn check_settings(&self, settings: &ToolSettings) -> anyhow::Result<()>;

    /// Makes the endpoints of a run's tools.
    ///
    /// # Errors
    /// Returns an error that names the key and the remedy.
    fn open_tools(
        &self,
        settings: &ToolSettings,
        run: &Arc<AgentRun>,
        process: ToolProcess<'_>,
    ) -> anyhow::Result<ToolEndpoints>;
}

/// The parts of the process that a run's tools need.
#[derive(Clone, Copy, Debug)]
pub struct ToolProcess<'a> {
    /// The tasks of the run.
    pub tasks: &'a TaskGroup,
    pub metrics: &'a Arc<MetricsRegistry>,
    /// Permits for the programs of this machine that print credentials for the runs of the process.
    pub programs: &'a Arc<KeyedPermits>,
    /// The look-ups of hosts of the runs of the process.
    pub lookups: &'a Arc<HostLookups>,
    /// Permits for the open tunnels of the runs of the process, with the run's name as the key.
    pub tunnels: &'a Arc<KeyedPermits>,
}

impl ToolSettings {
    /// Returns true if the run has no tools.
    pub fn is_empty(&self) -> bool {
        self.table.is_none() && self.agent.as_ref().is_none_or(|agent| agent.tools.is_empty())
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// Returns an error that names the key and the remedy.
    pub fn check(&self) -> anyhow::Result<()> {
        match (&self.opener, self.is_empty()) {
            (_, true) => Ok(()),
            (Some(opener), false) => opener.check_settings(self),
            (None, false) => anyhow::bail!(NO_OPENER_MESSAGE),
        }
    }

    /// Makes the endpoints of a run's tools; `None` if the run has no tools.
    ///
    /// # Errors
    /// Returns an error that names the key and the remedy.
    pub fn open_tools(
        &self,
        run: &Arc<AgentRun>,
        process: ToolProcess<'_>,
    ) -> anyhow::Result<Option<ToolEndpoints>> {
        match (&self.opener, self.is_empty()) {
            (_, true) => Ok(None),
            (Some(opener), false) => opener.open_tools(self, run, process).map(Some),
            (None, false) => anyhow::bail!(NO_OPENER_MESSAGE),
        }
    }
}

impl PartialEq for ToolSettings {
    fn eq(&self, other: &Self) -> bool {
        // The opener belongs to the process, not to the configuration.
        self.table == other.table && self.agent == other.agent && self.files == other.files
    }
}

impl fmt::Debug for ToolSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { table, agent, .. } = self;
        f.debug_struct("ToolSettings")
            .field("table", table)
            .field("agent", agent)
            .finish_non_exhaustive()
    }
}

impl Serialize for ToolSettings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut settings = serializer.serialize_map(None)?;
        settings.serialize_entry("table", &self.table)?;
        settings.serialize_entry("agent", &self.agent)?;
        if let Some(files) = self.files.as_ref().filter(|files| !files.is_empty()) {
            // The paths of files are no part of what judges a run.
            settings.serialize_entry("files", &files.values().collect::<Vec<_>>())?;
        }
        settings.end()
    }
}

impl<'de> Deserialize<'de> for ToolSettings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self { table: Some(toml::Table::deserialize(deserializer)?), ..Self::default() })
    }
}

const NO_OPENER_MESSAGE: &str = "`[tools]` cannot be served by this gateway; take the table out, or serve the run with `cogni-gateway proxy`, `run` or `serve`";
