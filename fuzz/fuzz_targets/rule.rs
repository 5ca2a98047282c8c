//! Any text of a condition is a rule that can be evaluated, or an error with a position inside the text; never
//! a panic, a hang, or a stack overflow.
#![cfg_attr(fuzzing, no_main)]

use cogni_gateway::gateway::pipeline::rule::{RuleConfig, RuleContext, RuleProblem, RuleSet};
use cogni_gateway_fuzz::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(when) = std::str::from_utf8(data) else { return };
    let config = RuleConfig {
        name: "r".into(),
        when: when.into(),
        refuse: Some("no".into()),
        set_model: None,
        max_output_tokens: None,
        headers: [].into(),
        matching: vec![],
        not_match: vec![],
    };
    match RuleSet::compile_rules(&[config]) {
        Ok(rules) => drop(rules.evaluate_rules(&RuleContext::default())),
        Err(error) => {
            let RuleProblem::InvalidCondition(invalid) = error.problem else { return };
            let Some((line, column)) = invalid.place else { return };
            let text = when.split('\n').nth(line - 1).expect("the place is in the text");
            assert!(column <= text.chars().count() + 1, "{line}:{column}");
        }
    }
});
