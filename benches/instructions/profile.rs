//! Reads the files that callgrind writes.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

/// The instructions of each function, by the function's file and name.
pub(crate) type FunctionCosts = HashMap<(String, String), u64>;

/// Reads the instructions that each function took itself, without those of the functions that it called.
pub(crate) fn read_costs(path: &Path) -> Result<FunctionCosts> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let (mut functions, mut objects) = (NameTable::default(), NameTable::default());
    let (mut function, mut object) = ("", "");
    let mut is_call = false;
    let mut costs: HashMap<(&str, &str), u64> = HashMap::new();
    for line in text.lines() {
        if let Some(entry) = line.strip_prefix("fn=") {
            function = functions.read_name(entry);
        } else if let Some(entry) = line.strip_prefix("cfn=") {
            functions.read_name(entry);
        } else if let Some(entry) = line.strip_prefix("ob=") {
            object = objects.read_name(entry);
        } else if let Some(entry) = line.strip_prefix("cob=") {
            objects.read_name(entry);
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            let cost = line.split(' ').nth(1).unwrap_or_default();
            let cost: u64 = cost.parse().with_context(|| format!("reading `{line}`"))?;
            // The line after `calls=` has the cost of the called function.
            if !std::mem::take(&mut is_call) {
                *costs.entry((object, function)).or_default() += cost;
            }
        }
    }
    ensure!(!costs.is_empty(), "callgrind counted nothing");
    let owned = |((object, function), cost): ((&str, &str), u64)| {
        ((object.to_owned(), function.to_owned()), cost)
    };
    Ok(costs.into_iter().map(owned).collect())
}

/// The names of a file, which stand only where they are first used: `(7) name`, and later `(7)`.
#[derive(Default)]
struct NameTable<'a>(HashMap<&'a str, &'a str>);

impl<'a> NameTable<'a> {
    fn read_name(&mut self, entry: &'a str) -> &'a str {
        match entry.split_once(' ') {
            Some((number, name)) => self.0.entry(number).or_insert(name),
            None => self.0.get(entry).copied().unwrap_or_default(),
        }
    }
}
