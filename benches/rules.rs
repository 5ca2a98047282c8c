//! Measures the evaluation of rules for a call.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench is not production code")]

use std::collections::HashMap;
use std::hint::black_box;

use cel::objects::Key;
use cel::{Context, Program, Value};
use cogni_gateway::gateway::pipeline::rule::{RuleConfig, RuleContext, RuleSet};
use criterion::{Criterion, criterion_group, criterion_main};

/// Conditions that do not match the call below, so that only the evaluation is measured.
const CONDITIONS: [(&str, &str); 4] = [
    ("compare", "usage.total_tokens > 1000000"),
    ("prefix_and_compare", "request.model.startsWith('claude-') && usage.total_tokens > 1000000"),
    ("list", "request.model in ['a', 'b', 'claude-opus-4-1', 'claude-opus-4-6', 'gpt-5-pro']"),
    ("pattern", "request.model.matches('^(gpt|o)-?[0-9.]+-pro$')"),
];

const CALL: &str = "
run = { id = 'run-1', metadata = { graph_id = 'coder' } }
request = { model = 'claude-opus-4-5', stream = true, bytes = 40000 }
usage = { turns = 12, input_tokens = 300000, output_tokens = 9000 }
";

fn bench_rules(c: &mut Criterion) {
    let call: RuleContext<'_> = toml::from_str(CALL).unwrap();
    let mut group = c.benchmark_group("rules");
    for (name, when) in CONDITIONS {
        for count in [1, 64] {
            let rules = rules_of(when, count);
            assert!(rules.evaluate_rules(&call).unwrap().matched.is_empty());
            let counted = allocation_counter::measure(|| drop(rules.evaluate_rules(&call)));
            println!("{name}/{count}: {} allocations", counted.count_total);
            group.bench_function(format!("{name}/{count}"), |b| {
                b.iter(|| rules.evaluate_rules(black_box(&call)).is_ok());
            });
        }
    }
    let (program, context) = in_cel(CONDITIONS[1].1);
    let counted = allocation_counter::measure(|| drop(program.execute(&context)));
    println!("{}/cel: {} allocations", CONDITIONS[1].0, counted.count_total);
    group.bench_function(format!("{}/cel", CONDITIONS[1].0), |b| {
        b.iter(|| program.execute(black_box(&context)).is_ok());
    });
    group.finish();
}

/// Returns the same condition for the interpreter of the `cel` crate, with the values of the same call that it needs.
fn in_cel(when: &str) -> (Program, Context<'static, 'static>) {
    let one = |name: &str, value: Value| {
        Value::Map(HashMap::from([(Key::from(name.to_owned()), value)]).into())
    };
    let mut context = Context::default();
    context.add_variable_from_value("request", one("model", "claude-opus-4-5".into()));
    context.add_variable_from_value("usage", one("total_tokens", Value::Int(309_000)));
    (Program::compile(when).unwrap(), context)
}

/// A set with this many rules of the same condition.
fn rules_of(when: &str, count: usize) -> RuleSet {
    let rule = |number| RuleConfig {
        name: format!("r-{number}"),
        when: when.to_owned(),
        refuse: Some("no".to_owned()),
        set_model: None,
        max_output_tokens: None,
        headers: [].into(),
        matching: vec![],
        not_match: vec![],
    };
    RuleSet::compile_rules(&(0..count).map(rule).collect::<Vec<_>>()).unwrap()
}

criterion_group!(benches, bench_rules);
criterion_main!(benches);
