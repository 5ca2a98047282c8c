//! Tables for people, made from the answers of the operator's socket.

use std::io::{self, Write};

use serde_json::Value;

use crate::base::hidden_characters::escape_hidden;

/// Prints an answer: a line for each run of a list, the facts of one run, or the result of a command.
pub(super) fn print(answer: &Value, out: &mut impl Write) -> io::Result<()> {
    // The shape of the answer tells which request it answers.
    if let Some(runs) = answer["runs"].as_array() {
        return print_runs(runs, out);
    }
    if answer["reloaded"] == true {
        return print_reload(answer, out);
    }
    if answer["closed"] == true {
        let cut = if answer["calls_cut"] == true { "; its open calls were cut" } else { "" };
        return writeln!(out, "run {} is closed{cut}", text(&answer["run_id"]));
    }
    // Every other answer is a run: the answer to `show`, and to the commands that change a run.
    print_run(answer, out)
}

fn print_runs(runs: &[Value], out: &mut impl Write) -> io::Result<()> {
    if runs.is_empty() {
        return writeln!(out, "no run is open");
    }
    let head = ["RUN", "STATE", "ACCOUNT", "TURNS", "TOKENS", "COST", "LEFT"];
    let rows = runs.iter().map(|run| {
        let spent = &run["budget"]["spent"];
        [
            text(&run["run_id"]),
            text(&run["state"]),
            text(&run["account"]),
            text(&spent["turns"]),
            tokens(spent),
            money(&spent["cost_usd"]),
            left(&run["budget"]),
        ]
    });
    // The head is a row like the others, so that it counts for the width of the columns.
    let rows: Vec<_> = [head.map(str::to_owned)].into_iter().chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    for row in &rows {
        let padded = row.iter().enumerate().map(|(column, cell)| {
            let width = width(column).unwrap_or_default();
            format!("{cell:width$}")
        });
        let line: Vec<_> = padded.collect();
        // The last column is padded too; its padding would only make lines longer.
        writeln!(out, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
}

fn print_run(run: &Value, out: &mut impl Write) -> io::Result<()> {
    let (budget, spent) = (&run["budget"], &run["budget"]["spent"]);
    let models = match run["models"].as_array() {
        Some(models) if !models.is_empty() => {
            models.iter().map(text).collect::<Vec<_>>().join(", ")
        }
        // An empty list of models is no restriction.
        _ => "any".to_owned(),
    };
    let limits = budget["limits"].as_object().into_iter().flatten();
    // A limit that is not set is null.
    let limits = limits.filter(|(_, limit)| !limit.is_null());
    let limits: Vec<_> = limits.map(|(name, limit)| format!("{name}={}", text(limit))).collect();
    let limits = if limits.is_empty() { "none".to_owned() } else { limits.join(" ") };
    let facts = [
        ("run", text(&run["run_id"])),
        ("attempt", text(&run["attempt"])),
        ("account", text(&run["account"])),
        ("state", text(&run["state"])),
        ("policy", format!("version {}", text(&run["policy"]["version"]))),
        ("models", models),
        (
            "calls",
            format!("{} admitted, {} refused", text(&run["admitted"]), text(&run["refused"])),
        ),
        (
            "spent",
            format!(
                "{} turns, {} tokens, {}",
                text(&spent["turns"]),
                tokens(spent),
                money(&spent["cost_usd"])
            ),
        ),
        ("left", left(budget)),
        ("limits", limits),
    ];
    facts.iter().try_for_each(|(name, fact)| writeln!(out, "{name:8} {fact}"))
}

fn print_reload(answer: &Value, out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "the configuration is read again, and in force for {} runs",
        text(&answer["runs"])
    )?;
    let kept = answer["keep_changes"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !kept.is_empty() {
        let kept: Vec<_> = kept.iter().map(text).collect();
        writeln!(
            out,
            "limits and models that an operator has set stay in force for: {}",
            kept.join(", ")
        )?;
    }
    Ok(())
}

/// Formats a value for people, in one line. Hidden characters are shown as numbers, because a client chose some texts and
/// a terminal obeys escapes.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => escape_hidden(text).replace(['\n', '\t'], " "),
        other => other.to_string(),
    }
}

fn tokens(spent: &Value) -> String {
    let sum = |names: [&str; 2]| names.iter().filter_map(|name| spent[*name].as_u64()).sum::<u64>();
    sum(["input", "output"]).to_string()
}

fn money(cost: &Value) -> String {
    match cost {
        Value::Null => "-".to_owned(),
        cost => format!("${}", text(cost)),
    }
}

fn left(budget: &Value) -> String {
    let left = [
        ("turns_left", "turns"),
        ("total_tokens_left", "tokens"),
        ("cost_left_usd", "dollars"),
        ("time_left", "of time"),
    ];
    let left: Vec<_> = left
        .into_iter()
        // A limit that is not set has no rest.
        .filter(|(name, _)| !budget[*name].is_null())
        .map(|(name, what)| format!("{} {what}", text(&budget[name])))
        .collect();
    if left.is_empty() { "no limit".to_owned() } else { left.join(", ") }
}
