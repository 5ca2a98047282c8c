//! Tests of the manual's page on rules: every rule on it loads, and its table has every fact.

use std::fs;

use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::pipeline::rule::RuleSet;

/// G13: Every rule on the page loads, so a reader can copy it.
#[test]
fn every_rule_in_the_manual_loads() {
    let manual = manual_page();
    let examples = manual.split("```toml\n").skip(1);
    let examples: Vec<_> = examples.map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(examples.len() >= 5);
    examples.into_iter().for_each(check_rules);
}

/// G13: The rule in the example configuration loads, too.
#[test]
fn the_rule_in_the_example_configuration_loads() {
    let file = fs::read_to_string("config/gateway.toml").unwrap();
    let lines: Vec<_> = file.lines().filter_map(|line| line.strip_prefix("#   ")).collect();
    check_rules(&lines.join("\n"));
}

/// G13: The table on the page has all facts, and no others.
#[test]
fn every_fact_is_in_the_manual() {
    let manual = manual_page();
    let mut names: Vec<_> =
        manual.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let mut facts: Vec<_> = ["run", "agent", "request", "usage"].map(facts_below).concat();
    // The facts below these have rows of their own.
    facts.retain(|fact| !fact.starts_with("usage.left") && fact != "run.metadata.NAME");
    facts.extend(["run.metadata".to_owned(), "usage.left".to_owned()]);
    facts.sort();
    names.sort_unstable();
    assert_eq!(names, facts);
}

/// Returns the facts that begin with a word, taken from the error for an unknown fact.
fn facts_below(word: &str) -> Vec<String> {
    let message = super::parse_rule(&format!("{word} == 1")).unwrap_err().to_string();
    let (_, parts) = message.split_once(" has `").unwrap();
    parts.trim_end_matches('`').split("`, `").map(|part| format!("{word}.{part}")).collect()
}

fn check_rules(text: &str) {
    let config: GatewayConfig = toml::from_str(text).unwrap();
    assert!(!config.policy.rules.is_empty());
    RuleSet::compile_rules(&config.policy.rules).unwrap();
}

fn manual_page() -> String {
    fs::read_to_string("src/manual/rules.md").unwrap()
}
