//! Tests of the files in `config/`.

use std::fs;

use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::run::{ToolOpener, ToolSettings};
use cogni_gateway::runner::RunRequest;
use cogni_gateway::runner::agents::AgentCatalog;
use cogni_gateway::runner::tool_opener::RunToolOpener;
use cogni_gateway::sandbox::spec::SandboxLimits;
use cogni_gateway::service::config::ServiceConfig;
use cogni_gateway::tools::config::ToolConfig;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// The example is complete and equals the defaults, so that it can serve as documentation.
#[test]
fn the_example_configuration_is_the_default() {
    let text = read_example();
    assert_eq!(toml::from_str::<GatewayConfig>(&text).unwrap(), GatewayConfig::default());
}

/// A setting that is commented out is a valid setting.
#[test]
fn the_commented_settings_are_valid() {
    toml::from_str::<GatewayConfig>(&uncommented_example()).unwrap();
}

/// Each table is given an unknown key; the error lists the known keys, and the example must have them all.
#[test]
fn the_example_configuration_leaves_nothing_out() {
    // The gateway ignores the service's table, which has its own file.
    assert_complete::<GatewayConfig>(&format!("serve = {{}}\n{}", uncommented_example()));
    assert_complete::<ServiceFile>(&all_of(&service_example()));
}

#[test]
fn the_example_of_a_service_is_the_default() {
    let read = toml::from_str::<ServiceFile>(&service_example()).unwrap();
    assert_eq!(read.serve, ServiceConfig::default());
    let gateway = toml::from_str::<GatewayConfig>(&service_example()).unwrap();
    assert_eq!(gateway, GatewayConfig { has_service_table: true, ..GatewayConfig::default() });
}

/// T7: the example shows every key of the tools, and they can be loaded.
#[test]
fn the_example_of_tools_leaves_nothing_out() {
    let text = uncommented_example();
    let start = text.find("[tools]").unwrap();
    let end = start + text[start..].find("\n[audit]").unwrap();
    assert_complete::<ToolFile>(&text[start..end]);
    let table = text[start..end].parse::<toml::Table>().unwrap()["tools"].as_table().cloned();
    RunToolOpener::default()
        .check_settings(&ToolSettings { table, ..ToolSettings::default() })
        .unwrap();
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolFile {
    #[expect(dead_code, reason = "only the keys are looked at")]
    tools: ToolConfig,
}

/// The example of a service has one table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ServiceFile {
    serve: ServiceConfig,
}

fn assert_complete<T: DeserializeOwned>(text: &str) {
    let shown: toml::Table = text.parse().unwrap();
    // The wing of the tools parses its own table, which has a test of its own.
    let is_foreign = |line: &str| line.trim_start_matches('[').starts_with("tools");
    let is_own = std::any::type_name::<T>().ends_with("ToolFile");
    let tables = text.lines().filter(|line| line.starts_with('[') && (is_own || !is_foreign(line)));
    for header in tables.chain([""]) {
        let asked = if header.is_empty() {
            format!("no_such_key = 1\n{text}")
        } else {
            text.replace(header, &format!("{header}\nno_such_key = 1"))
        };
        let answer = toml::from_str::<T>(&asked).err().unwrap().to_string();
        let expected = answer
            .split("expected one of")
            .nth(1)
            .or_else(|| answer.split("expected").nth(1))
            .unwrap();
        let table = header
            .trim_matches(['[', ']'])
            .split('.')
            .filter(|name| !name.is_empty())
            .fold(&shown, |table, name| table_in(&table[name]));
        // A server is an address or a program, so no example of one has all keys.
        let servers = header.starts_with("[tools.mcp.").then(|| table_in(&shown["tools"]["mcp"]));
        let tables = servers.into_iter().flat_map(|servers| servers.values().map(table_in));
        let tables: Vec<_> = tables.chain([table]).collect();
        for key in expected.split('`').skip(1).step_by(2) {
            assert!(tables.iter().any(|table| table.contains_key(key)), "{header} lacks `{key}`");
        }
    }
}

/// Returns the table itself, or the first of several.
fn table_in(value: &toml::Value) -> &toml::Table {
    value.as_table().unwrap_or_else(|| value[0].as_table().unwrap())
}

fn read_example() -> String {
    fs::read_to_string("config/gateway.toml").unwrap()
}

fn service_example() -> String {
    fs::read_to_string("config/serve.toml").unwrap()
}

fn uncommented_example() -> String {
    all_of(&read_example())
}

/// Returns an example with its commented settings and tables enabled.
fn all_of(text: &str) -> String {
    let is_setting = |line: &str| {
        line.split_once(" = ").is_some_and(|(key, _)| {
            key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        })
    };
    let is_table = |line: &str| line.starts_with('[') && line.ends_with(']');
    let line = |line: &str| {
        let meant = |rest: &&str| is_setting(rest) || is_table(rest);
        line.strip_prefix("# ").filter(meant).unwrap_or(line).to_owned()
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// The built-in catalog equals the shipped files.
#[test]
fn the_built_in_catalog_is_the_directory() {
    assert_eq!(
        AgentCatalog::load_directory("config/agents".as_ref()).unwrap(),
        AgentCatalog::builtin()
    );
}

/// The example of a run names every key, and the values that are not commented out are the defaults.
#[test]
fn the_example_of_a_run_leaves_nothing_out() {
    let text = fs::read_to_string("config/run.toml").unwrap();
    let request: RunRequest = toml::from_str(&text).unwrap();
    assert_eq!(request.limits.resolve_limits(), SandboxLimits::default());
    let text = all_of(&text);
    toml::from_str::<RunRequest>(&text).unwrap();
    assert_complete::<RunRequest>(&text);
}
