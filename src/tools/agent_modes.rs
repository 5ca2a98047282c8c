//! The modes of an agent: switches in its file for groups of tools, for its workspace and for its sandbox.
//!
//! An agent's list says which tools it may call, by name. A mode says what it may do, for all tools of a group at once:
//! `web = "off"` takes every tool and connection of the group `web` away. The gateway's `[tools.groups]` says which
//! ones belong to a group. A mode never adds anything.

use std::collections::BTreeSet;

use serde::{Deserialize, Deserializer, Serialize, de};
use utoipa::ToSchema;

use super::config::{LIST_RULE, ToolConfig, ToolConfigError, ToolGroupConfig};
use super::connection_config::AGENT_PREFIX;
use crate::base::serde_words;
use crate::base::star_pattern::select_names;
use crate::sandbox::spec::MountAccess;

/// The table `[modes]` of an agent's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AgentModes {
    /// The commands that the agent may run through tools.
    pub commands: CommandMode,
    /// The agent's access to the web.
    pub web: AccessMode,
    /// The agent's access to files through tools.
    pub files: AccessMode,
    /// The agent's access to its run's workspace.
    pub workspace: WorkspaceMode,
    /// The runs that share a long-running sandbox and its workspace.
    pub scope: SandboxScope,
    /// The runs that are in a sandbox.
    #[serde(deserialize_with = "deserialize_sandbox_mode")]
    pub sandbox: SandboxMode,
}

/// The mode of the tools that run commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommandMode {
    /// No such tool may be called.
    Off,
    /// A person is asked about each call.
    Ask,
    /// The other layers decide.
    #[default]
    Auto,
}

/// The mode of a group of tools and connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AccessMode {
    /// None of the group may be used.
    Off,
    /// The other layers decide.
    #[default]
    On,
}

/// The access of an agent and its tools to the run's workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceMode {
    /// There is no workspace: the agent's home is an empty directory in memory, and no tool sees it.
    None,
    /// The agent and its tools may read the workspace. No tool that writes to it may be called.
    Ro,
    #[default]
    Rw,
}

/// The runs that share a long-running sandbox and its workspace. Runs of different grants or accounts never share one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxScope {
    /// The runs of the agent with the same branch, work item or state key.
    #[default]
    Session,
    /// All runs of the agent.
    Agent,
    /// All runs of all agents with this scope. They share the workspace, and each agent has its own sandbox.
    Shared,
}

/// The runs that are in a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxMode {
    /// Every run is in a sandbox.
    #[default]
    All,
}

/// A group of tools and connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolGroup {
    Commands,
    Web,
    Files,
}

/// The tools and connections of each group, as a configuration names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolGroups {
    commands: BTreeSet<String>,
    web: BTreeSet<String>,
    files: BTreeSet<String>,
}

/// The layer of the agent: its list of tools and connections, and its modes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AgentToolLayer {
    listed: BTreeSet<String>,
    modes: AgentModes,
    #[serde(skip)]
    groups: ToolGroups,
}

impl AgentModes {
    /// Parses the table. An unknown key is an error.
    ///
    /// # Errors
    /// Returns an error that names the key.
    pub fn from_table(table: &toml::Table) -> Result<Self, ToolConfigError> {
        toml::Value::Table(table.clone()).try_into().map_err(|error: toml::de::Error| {
            let problem = serde_words::in_words("", error.message());
            ToolConfigError::new("", format!("the agent's file has a wrong `modes`: {problem}"))
        })
    }

    /// Returns the table, which is empty if no mode differs from its default.
    ///
    /// # Panics
    /// Never: every mode is a word.
    pub fn to_table(self) -> toml::Table {
        if self == Self::default() {
            return toml::Table::new();
        }
        toml::Table::try_from(self).expect("every mode is a word")
    }

    /// Returns true if the mode of a group is not the widest one.
    pub fn restricts(self, group: ToolGroup) -> bool {
        match group {
            ToolGroup::Commands => self.commands != CommandMode::Auto,
            ToolGroup::Web => self.web == AccessMode::Off,
            ToolGroup::Files => self.files == AccessMode::Off,
        }
    }

    /// Returns true if the mode of a group lets no call begin.
    fn switches_off(self, group: ToolGroup) -> bool {
        match group {
            ToolGroup::Commands => self.commands == CommandMode::Off,
            ToolGroup::Web | ToolGroup::Files => self.restricts(group),
        }
    }
}

impl ToolGroup {
    pub const ALL: [Self; 3] = [Self::Commands, Self::Web, Self::Files];

    /// Returns the name in `[tools.groups]` and in `[modes]`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Commands => "commands",
            Self::Web => "web",
            Self::Files => "files",
        }
    }

    /// Returns the rule that refusals and records name.
    pub fn mode_rule(self) -> &'static str {
        match self {
            Self::Commands => COMMANDS_RULE,
            Self::Web => "modes.web",
            Self::Files => "modes.files",
        }
    }
}

impl ToolGroups {
    /// Resolves the patterns of a configuration.
    ///
    /// # Errors
    /// Returns the pattern that adds nothing, or the connection that stands among the commands.
    pub fn from_config(config: &ToolConfig) -> Result<Self, ToolConfigError> {
        let connections = config.connections.keys().map(|name| format!("{AGENT_PREFIX}{name}"));
        let names: Vec<_> = config.granted.iter().cloned().chain(connections.clone()).collect();
        let select = |group: ToolGroup, patterns: &[String]| {
            select_names(patterns, &names).map_err(|pattern| {
                let pattern = pattern.escape_debug();
                let problem = format!("`{pattern}` adds no granted tool or connection; remove it");
                ToolConfigError::new(format!("groups.{}", group.name()), problem)
            })
        };
        let ToolGroupConfig { commands, web, files } = &config.groups;
        let commands = select(ToolGroup::Commands, commands)?;
        if let Some(name) = connections.clone().find(|name| commands.contains(name)) {
            let problem =
                format!("`{name}` is a connection, which runs no command; give it to `web`");
            return Err(ToolConfigError::new("groups.commands", problem));
        }
        let (web, files) = (select(ToolGroup::Web, web)?, select(ToolGroup::Files, files)?);
        Ok(Self { commands, web, files })
    }

    fn members(&self, group: ToolGroup) -> &BTreeSet<String> {
        match group {
            ToolGroup::Commands => &self.commands,
            ToolGroup::Web => &self.web,
            ToolGroup::Files => &self.files,
        }
    }
}

impl AgentToolLayer {
    /// Applies the modes of an agent to the groups of a configuration. `listed` is the list of tools in the agent's file.
    ///
    /// # Errors
    /// Returns a mode that restricts a group without members, although the agent has tools: no call would meet it.
    pub fn resolve_layer(
        listed: &[String],
        modes: AgentModes,
        groups: ToolGroups,
    ) -> Result<Self, ToolConfigError> {
        let is_unmet =
            |group: &ToolGroup| modes.restricts(*group) && groups.members(*group).is_empty();
        if let (false, Some(group)) = (listed.is_empty(), ToolGroup::ALL.into_iter().find(is_unmet))
        {
            let name = group.name();
            return Err(ToolConfigError::new(
                format!("groups.{name}"),
                format!(
                    "names no tool, and the agent's file restricts `modes.{name}`; name the tools of the group, or remove the mode"
                ),
            ));
        }
        Ok(Self { listed: listed.iter().cloned().collect(), modes, groups })
    }

    /// Returns the most access to its run's workspace that the agent may have.
    pub fn workspace_access(&self) -> Option<MountAccess> {
        match self.modes.workspace {
            WorkspaceMode::None => None,
            WorkspaceMode::Ro => Some(MountAccess::ReadOnly),
            WorkspaceMode::Rw => Some(MountAccess::ReadWrite),
        }
    }

    /// Returns the tools and connections of the agent's list.
    pub fn listed_names(&self) -> &BTreeSet<String> {
        &self.listed
    }

    /// Returns the rule that denies a tool or connection to the agent: its list, or one of its modes.
    pub fn denying_rule(&self, name: &str) -> Option<&'static str> {
        if !self.listed.contains(name) {
            return Some(LIST_RULE);
        }
        let is_off = |group: &ToolGroup| {
            self.modes.switches_off(*group) && self.groups.members(*group).contains(name)
        };
        ToolGroup::ALL.into_iter().find(is_off).map(ToolGroup::mode_rule)
    }

    /// Returns the tools and connections that the list names and no mode takes away.
    pub fn callable_names(&self) -> BTreeSet<String> {
        self.listed.iter().filter(|name| self.denying_rule(name).is_none()).cloned().collect()
    }

    /// Returns true if a person is asked about each call of a tool.
    pub fn asks_about(&self, tool: &str) -> bool {
        self.modes.commands == CommandMode::Ask
            && self.listed.contains(tool)
            && self.groups.commands.contains(tool)
    }
}

fn deserialize_sandbox_mode<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<SandboxMode, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "all" => Ok(SandboxMode::All),
        _ => Err(de::Error::custom(
            "every run is in a sandbox, and no mode takes it out; give `all`, or remove the key",
        )),
    }
}

/// The rule of an agent whose commands ask a person.
pub const COMMANDS_RULE: &str = "modes.commands";
