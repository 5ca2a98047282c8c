//! The scene of the demo about tools: a granted call with a price, a refused one, and a spent budget.

use std::io::Write;
use std::sync::Arc;

use serde_json::{Value, json};

use super::client::DemoHttpClient;
use super::write_heading;
use crate::gateway::run::ToolSettings;
use crate::runner::tool_opener::RunToolOpener;
use crate::tools::definition::{CURRENT_TIME_TOOL, METRICS_QUERY_TOOL};

/// Returns the settings of the demo's tools and of its connection, as the table `[tools]` of a file.
pub(super) fn demo_tools(connection: &str) -> anyhow::Result<ToolSettings> {
    let table = Some(toml::from_str(&format!("{TOOLS_TABLE}{connection}"))?);
    Ok(ToolSettings {
        table,
        opener: Some(Arc::new(RunToolOpener::default())),
        ..ToolSettings::default()
    })
}

/// Calls tools on the run's socket, and narrates the answers.
pub(super) async fn narrate_tools(
    client: &DemoHttpClient<'_>,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    write_heading(out, "6. Tools on the same socket: granted, refused, and spent")?;
    let listed = client.get("/tool/list").await?.json();
    for tool in listed["tools"].as_array().into_iter().flatten() {
        let (name, price) = (text(&tool["name"]), text(&tool["price_usd"]));
        writeln!(
            out,
            "  granted        {name} at ${price} a call, {} left",
            tool["left"]["calls"]
        )?;
    }
    for tool in [CURRENT_TIME_TOOL, METRICS_QUERY_TOOL, CURRENT_TIME_TOOL] {
        let answer =
            client.post("/tool/exec", &json!({"tool": tool, "arguments": {}}), &[]).await?;
        let body = answer.json();
        let said = if body["error"].is_null() {
            format!("{}, cost ${}", text(&body["result"]["time"]), text(&body["cost_usd"]))
        } else {
            let error = &body["error"];
            match error["rule"].as_str() {
                Some(rule) => format!(
                    "{} by layer {}, rule {rule}",
                    text(&error["code"]),
                    text(&error["layer"])
                ),
                None => text(&error["code"]).to_owned(),
            }
        };
        writeln!(out, "  {tool:<24} {} {said}", answer.status)?;
    }
    Ok(())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

const TOOLS_TABLE: &str = r#"
granted = ["core__get_current_time"]

[[rules]]
name = "one-look-at-the-clock"
tool = "core__get_current_time"
price_usd = "0.002"
budget = { calls = 1 }
"#;
