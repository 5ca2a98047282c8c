//! Tests of loading rules: the error of each wrong rule, and that no text harms the loader.

use proptest::prelude::*;

use super::{parse_facts, parse_rule, parse_rules};

/// Returns the error of a wrong condition.
fn condition_error(when: &str) -> String {
    parse_rule(when).unwrap_err().to_string()
}

/// Returns the error of a rule with a valid condition and these other lines.
fn wrong_rule(lines: &str) -> String {
    parse_rules(&format!("[[rules]]\nname = 'r'\nwhen = 'true'\n{lines}")).unwrap_err().to_string()
}

/// G13: The loader refuses an unknown name; the error has its position and lists the known names.
#[test]
fn the_error_of_an_unknown_name_lists_the_known_names() {
    let messages = [
        "modle == 'x'",
        "request.modle == 'x'",
        "request.stream &&\n  usage.left.dollars < 1.0",
        "request == 'x'",
        "run.metadata == 'x'",
        "run.metadata.a.b == 'x'",
        "run.id.size == 1",
        "'é' == request.modle",
    ]
    .map(condition_error);
    insta::assert_snapshot!(messages.join("\n"), @r"
    rule `r`: `when`, line 1, column 1: `modle` is not a fact; facts begin with `run`, `agent`, `request` or `usage`
    rule `r`: `when`, line 1, column 1: `request.modle` is not a fact; `request` has `route`, `protocol`, `model`, `stream`, `bytes`, `input_tokens`, `max_output_tokens`, `choices`
    rule `r`: `when`, line 2, column 3: `usage.left.dollars` is not a fact; `usage.left` has `turns`, `input_tokens`, `output_tokens`, `total_tokens`, `cost_usd`
    rule `r`: `when`, line 1, column 1: `request` is not a fact; `request` has `route`, `protocol`, `model`, `stream`, `bytes`, `input_tokens`, `max_output_tokens`, `choices`
    rule `r`: `when`, line 1, column 1: `run.metadata` is not a fact; `run.metadata` has `NAME`
    rule `r`: `when`, line 1, column 1: `run.metadata.a.b` is not a fact; facts begin with `run`, `agent`, `request` or `usage`
    rule `r`: `when`, line 1, column 1: `run.id.size` is not a fact; facts begin with `run`, `agent`, `request` or `usage`
    rule `r`: `when`, line 1, column 9: `request.modle` is not a fact; `request` has `route`, `protocol`, `model`, `stream`, `bytes`, `input_tokens`, `max_output_tokens`, `choices`
    ");
}

/// G13: Types are checked when a rule is loaded, not when it is evaluated.
#[test]
fn a_type_error_names_its_position() {
    let messages = [
        "request.model",
        "request.model > 5",
        "usage.cost_usd + usage.turns > 1",
        "usage.cost_usd + 1 > 1.0",
        "request.model + 'x' == 'y'",
        "!usage.turns",
        "request.stream > false",
        "request.model && request.stream",
        "usage.turns ? request.stream : true",
        "(request.stream ? 1 : 1.0) > 1",
        "usage.turns in ['a']",
        "request.model in request.model",
        "request.stream.matches('x')",
        "request.bytes.startsWith('1')",
        "false && 1 % 2.0 == 1",
        "request.model == null",
        "usage.turns > 5u",
    ]
    .map(condition_error);
    insta::assert_snapshot!(messages.join("\n"), @r#"
    rule `r`: `when` is a string; it has to be true or false
    rule `r`: `when`, line 1, column 15: this operation is not possible for a string and an int
    rule `r`: `when`, line 1, column 16: this operation is not possible for a double and an int; write numbers as `1.0`, facts as `double(usage.turns)`
    rule `r`: `when`, line 1, column 16: this operation is not possible for a double and an int; write numbers as `1.0`, facts as `double(usage.turns)`
    rule `r`: `when`, line 1, column 15: this operation is not possible for a string and a string
    rule `r`: `when`, line 1, column 1: this operation is not possible for an int
    rule `r`: `when`, line 1, column 16: this operation is not possible for a bool and a bool
    rule `r`: `when`, line 1, column 15: this operation is not possible for a string and a bool
    rule `r`: `when`, line 1, column 13: before `?` stands an int; it has to be true or false
    rule `r`: `when`, line 1, column 17: this operation is not possible for an int and a double; write numbers as `1.0`, facts as `double(usage.turns)`
    rule `r`: `when`, line 1, column 17: this operation is not possible for an int and a string
    rule `r`: `when`, line 1, column 15: after `in` has to stand a list, such as `["a", "b"]`
    rule `r`: `when`, line 1, column 8: a pattern cannot match a bool
    rule `r`: `when`, line 1, column 25: this operation is not possible for an int and a string
    rule `r`: `when`, line 1, column 12: this operation is not possible for an int and a double; write numbers as `1.0`, facts as `double(usage.turns)`
    rule `r`: `when`, line 1, column 18: nothing is null; a fact that is missing is empty, or 0
    rule `r`: `when`, line 1, column 15: write the number without `u`
    "#);
}

/// G13: CEL features that hide a rule's cost are not supported, and the error says so.
#[test]
fn unsupported_cel_features_are_named() {
    let messages = [
        "[1, 2].all(x, x > 1)",
        "has(run.metadata.team)",
        "{'a': 1}.a == 1",
        "[1] == [1]",
        "size([1]) == 1",
        "[1][0] == 1",
        "request.model[0] == 'x'",
        "startsWith(request.model, 'x')",
        "request.model.matches(agent.name)",
        "request.model.matches('(')",
        "request.model.matches('(\\\\w{50}){50}')",
        "timestamp('2026-01-01T00:00:00Z') < 1",
        "string(usage.turns) == '1'",
        "a.b{c: 1}",
    ]
    .map(condition_error);
    insta::assert_snapshot!(messages.join("\n"), @r"
    rule `r`: `when`, line 1, column 11: `all` is not known here; there are `startsWith`, `endsWith`, `contains`, `matches`, `size`, `double`
    rule `r`: `when`, line 1, column 4: `has` is not known here; there are `startsWith`, `endsWith`, `contains`, `matches`, `size`, `double`
    rule `r`: `when`, line 1, column 9: only facts have parts
    rule `r`: `when`, line 1, column 1: a list may stand after `in` only
    rule `r`: `when`, line 1, column 6: a list may stand after `in` only
    rule `r`: `when`, line 1, column 4: only facts have parts
    rule `r`: `when`, line 1, column 14: only facts have parts
    rule `r`: `when`, line 1, column 11: `startsWith` is not known here; there are `startsWith`, `endsWith`, `contains`, `matches`, `size`, `double`
    rule `r`: `when`, line 1, column 28: write the pattern itself here, so that it can be checked
    rule `r`: `when`, line 1, column 23: the pattern is not a regular expression: unclosed group
    rule `r`: `when`, line 1, column 23: the pattern takes more than 65536 bytes when compiled; make it shorter
    rule `r`: `when`, line 1, column 10: `timestamp` is not known here; there are `startsWith`, `endsWith`, `contains`, `matches`, `size`, `double`
    rule `r`: `when`, line 1, column 7: `string` is not known here; there are `startsWith`, `endsWith`, `contains`, `matches`, `size`, `double`
    rule `r`: `when`, line 1, column 4: maps and structs are not known here
    ");
}

/// G13: The loader refuses a comparison with a word that the fact can never have, because such a rule would silently
/// never match.
#[test]
fn an_impossible_word_is_refused() {
    let messages = [
        "request.route == 'chat'",
        "'gemini' != request.protocol",
        "request.route in ['messages', 'models']",
    ]
    .map(condition_error);
    insta::assert_snapshot!(messages.join("\n"), @r"
    rule `r`: `when`, line 1, column 18: `request.route` is never `chat`; it is one of `chat_completions`, `completions`, `responses`, `messages`, `count_tokens`, `embeddings`
    rule `r`: `when`, line 1, column 1: `request.protocol` is never `gemini`; it is one of `chat`, `responses`, `messages`
    rule `r`: `when`, line 1, column 31: `request.route` is never `models`; it is one of `chat_completions`, `completions`, `responses`, `messages`, `count_tokens`, `embeddings`
    ");
}

/// G13: The error of a syntax error has its position.
#[test]
fn a_syntax_error_names_its_position() {
    let messages = [
        "",
        "request.stream &&",
        "request.stream && (usage.turns > 1",
        "request.model = 'x'",
        "request.model == 'x",
        "request.model == 'x' and request.stream",
        "usage.turns > 99999999999999999999",
        "'\\uD800' == 'x'",
    ]
    .map(condition_error);
    insta::assert_snapshot!(messages.join("\n"), @r#"
    rule `r`: `when`, line 1, column 1: is not CEL: the expression ends too early
    rule `r`: `when`, line 1, column 18: is not CEL: the expression ends too early
    rule `r`: `when`, line 1, column 35: is not CEL: missing ')' at the end
    rule `r`: `when`, line 1, column 15: is not CEL: token recognition error at: '= '
    rule `r`: `when`, line 1, column 18: is not CEL: token recognition error at: ''x'
    rule `r`: `when`, line 1, column 22: is not CEL: mismatched input 'and'
    rule `r`: `when`, line 1, column 15: is not CEL: invalid int literal
    rule `r`: `when`, line 1, column 1: is not CEL: invalid string literal: InvalidUnicode { source: Unicode { value: 55296 }, index: 0, string: "\\uD800" }
    "#);
}

/// G13: A condition that fails for a run's first call would refuse that call, so the loader refuses the condition.
#[test]
fn a_condition_that_fails_for_the_first_call_is_refused() {
    insta::assert_snapshot!(condition_error("usage.total_tokens / usage.turns > 1000"), @"rule `r`: `when` cannot be evaluated for the first call of a run: a number is divided by zero; add a guard, as in `usage.turns > 0 && …`");
    assert!(parse_rule("usage.turns > 0 && usage.total_tokens / usage.turns > 1000").is_ok());
}

/// G13: The size of a condition is limited, which bounds its cost.
#[test]
fn a_condition_has_a_largest_size() {
    let long = format!("request.model == '{}'", "x".repeat(2048 - 19 + 1));
    let nested = |times| format!("{}true{}", "(".repeat(times), ")".repeat(times));
    let chain = |times: usize| vec!["true"; times].join("||");
    let messages = [&long, &nested(33), &chain(129)].map(|when| condition_error(when));
    insta::assert_snapshot!(messages.join("\n"), @r"
    rule `r`: `when` is 2049 bytes long, the limit is 2048
    rule `r`: `when` has 33 opening brackets and `?`, the limit is 32; make it two rules
    rule `r`: `when` has more than 256 names, values and operators; make it two rules
    ");
    for when in
        [&long[1..].replacen("equest", "request", 1).replacen('x', "", 1), &nested(32), &chain(128)]
    {
        assert!(parse_rule(when).is_ok(), "{when}");
    }
}

/// G13: The loader refuses a rule without effects, or with effects that exclude each other.
#[test]
fn a_rule_has_to_make_sense() {
    let messages = [
        "",
        "refuse = 'no'\nset_model = 'x'",
        "refuse = ''",
        "refuse = \"a\\nb\"",
        "set_model = ''",
        "max_output_tokens = 0",
    ]
    .map(wrong_rule);
    insta::assert_snapshot!(messages.join("\n"), @r"
    rule `r`: the rule has no effect; give `refuse`, `set_model`, `max_output_tokens` or `headers`
    rule `r`: `refuse` ends the call, so `set_model` has no effect; remove `set_model` or `refuse`
    rule `r`: `refuse` is empty, longer than 256 bytes, or has a control character
    rule `r`: `refuse` is empty, longer than 256 bytes, or has a control character
    rule `r`: `set_model` must be the name of one model: 1 to 256 bytes, without a comma, `*`, `://`, control or invisible characters, and without blanks at its ends
    rule `r`: `max_output_tokens` is 0; use `refuse` to let nothing through
    ");
    let twice = "[[rules]]\nname = 'r'\nwhen = 'true'\nrefuse = 'no'\n";
    insta::assert_snapshot!(parse_rules(&twice.repeat(2)).unwrap_err(), @"rule `r`: an earlier rule has the same name; give each rule its own name");
    insta::assert_snapshot!(parse_rules(&twice.replace("'r'", "'No opus!'")).unwrap_err(), @"rule `No opus!`: the name is not 1 to 64 small letters, digits and `-`");
    let many: String = (0..=64).map(|n| twice.replace("'r'", &format!("'r-{n}'"))).collect();
    insta::assert_snapshot!(parse_rules(&many).unwrap_err(), @"rule `r-64`: there are more than 64 rules; join some of them with `||`");
}

/// G13, G4: A rule cannot set a header that decides about the caller or the destination.
#[test]
fn a_rule_cannot_set_the_gateways_headers() {
    for name in [
        "authorization",
        "host",
        "content-length",
        "user-agent",
        "accept-encoding",
        "cookie",
        "x-api-key",
        "x-litellm-end-user-id",
        "x-litellm-customer-id",
        "x-goog-api-key",
        "x-forwarded-for",
        "x-Team",
        "x-te am",
        "x-\u{e9}",
        "",
    ] {
        let messages = wrong_rule(&format!("headers = {{ {name:?} = 'a' }}"));
        assert_eq!(
            messages,
            format!(
                "rule `r`: the header `{name}` may not be set; use a name of your own in small letters that begins with `x-`"
            )
        );
    }
    insta::assert_snapshot!(wrong_rule("headers = { x-team = \"a\\r\\nhost: b\" }"), @"rule `r`: `headers` is empty, longer than 256 bytes, or has a control character");
    let many: Vec<_> = (0..=16).map(|n| format!("x-h{n} = 'a'")).collect();
    insta::assert_snapshot!(wrong_rule(&format!("headers = {{ {} }}", many.join(", "))), @"rule `r`: there are more than 16 headers");
}

/// G13: A rule's own examples are checked when it is loaded.
#[test]
fn a_failing_example_is_refused() {
    let with = |examples: &str| {
        parse_rules(&format!(
            "[[rules]]\nname = 'r'\nwhen = \"request.model == 'a' && 100 / request.bytes > 0\"\nrefuse = 'no'\n{examples}"
        ))
    };
    let one = "{ request = { model = 'a', bytes = 1 } }";
    let other = "{ request = { model = 'b', bytes = 1 } }";
    assert!(with(&format!("match = [{one}]\nnot_match = [{other}]")).is_ok());
    let messages = [
        format!("match = [{one}, {other}]"),
        format!("not_match = [{other}, {one}]"),
        "match = [{ request = { model = 'a' } }]".to_owned(),
    ]
    .map(|examples| with(&examples).unwrap_err().to_string());
    insta::assert_snapshot!(messages.join("\n"), @r"
    rule `r`: example 2 of `match` does not match
    rule `r`: example 2 of `not_match` matches
    rule `r`: example 1 of `match` cannot be evaluated: a number is divided by zero
    ");
}

/// G13: An example may contain facts only; unknown members are refused.
#[test]
fn an_example_names_facts_only() {
    let error = |text: &str| {
        toml::from_str::<cogni_gateway::gateway::pipeline::rule::RuleContext<'_>>(text)
            .unwrap_err()
            .message()
            .to_owned()
    };
    insta::assert_snapshot!(error("request = { modle = 'x' }"), @"unknown field `modle`, expected one of `route`, `model`, `stream`, `bytes`, `input_tokens`, `max_output_tokens`, `choices`");
    insta::assert_snapshot!(error("request = { route = 'chat' }"), @"`chat` is not a route that rules see; give `chat_completions`, `completions`, `responses`, `messages`, `count_tokens`, `embeddings`");
    assert_eq!(
        parse_facts(""),
        parse_facts("request = { route = 'chat_completions', choices = 1 }")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// G13: Any text gives a rule or an error. The interesting part is how the parser handles brackets.
    #[test]
    fn no_text_harms_the_loader(parts in prop::collection::vec(any_part(), 0..64)) {
        let when = parts.concat();
        if let Ok(rules) = parse_rule(&when) {
            let _ = rules.evaluate_rules(&parse_facts(""));
        }
    }
}

/// Words, operators and brackets of CEL, and invalid text.
fn any_part() -> impl Strategy<Value = String> {
    let known = [
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "?",
        ":",
        ",",
        ".",
        "!",
        "-",
        "+",
        "*",
        "/",
        "%",
        "==",
        "!=",
        "<",
        ">=",
        "&&",
        "||",
        " in ",
        "true",
        "1",
        "2.5",
        "1u",
        "0x",
        "'a'",
        "\"",
        "'''",
        "r'",
        "b'",
        "\\",
        "//",
        "\n",
        "`",
        "request",
        "model",
        ".stream",
        "usage.turns",
        "size(",
        ".matches(",
        "has(",
        ".all(x,",
        "null",
        "é",
        "\0",
    ];
    prop_oneof![9 => prop::sample::select(known.to_vec()).prop_map(str::to_owned), 1 => ".{0,3}"]
}
