//! L1: Tests of branch keys: the name of a run's branch, and runs without a branch.

use std::process::Command;

use cogni_gateway::relay::repo::{BranchKey, SandboxBranch, branch_key::BranchKeySources};
use proptest::prelude::*;

/// L1: The key comes from an explicit name, then the work item, then the state key if that is enabled.
#[test]
fn the_first_source_with_a_value_names_the_branch() {
    let choose = |explicit, work_item, state, may_use_state| {
        let sources = BranchKeySources { explicit, work_item, state, may_use_state };
        BranchKey::from_sources(sources, "run-1").unwrap().map(|key| key.to_string())
    };
    let named = |key: &str| Some(key.to_owned());
    assert_eq!(choose(Some("name"), Some("item"), Some("state"), true), named("name"));
    assert_eq!(choose(None, Some("item"), Some("state"), true), named("item"));
    assert_eq!(choose(Some(""), None, Some("state"), true), named("state"));
    assert_eq!(choose(None, None, Some("state"), false), None);
    assert_eq!(choose(None, None, None, true), None);
}

/// L1: The run id is never the key, from any source.
#[test]
fn a_runs_id_is_no_key() {
    for at in 0..3 {
        let source = |index| (index == at).then_some("run-1");
        let sources = BranchKeySources {
            explicit: source(0),
            work_item: source(1),
            state: source(2),
            may_use_state: true,
        };
        insta::allow_duplicates! {
            insta::assert_snapshot!(
                BranchKey::from_sources(sources, "run-1").unwrap_err(),
                @"`run-1` is the run's id, and no two runs could share its branch; name the work instead"
            );
        }
    }
}

/// L1: An invalid name is an error, and no later source replaces it.
#[test]
fn the_error_of_an_invalid_name_states_the_rule() {
    let sources = BranchKeySources {
        explicit: Some("../main"),
        work_item: Some("item"),
        ..BranchKeySources::default()
    };
    insta::assert_snapshot!(
        BranchKey::from_sources(sources, "run-1").unwrap_err(),
        @"`../main` cannot name a branch; use 1 to 100 letters, digits, `.`, `_` or `-`, and begin with a letter or a digit"
    );
    let long = "k".repeat(101);
    let bad = ["", ".a", "-a", "_a", "a/b", "a b", "a\n", "ä", "a\0", "a~1", "a:b", "a@{1}", &long];
    for text in bad.into_iter().chain(["a..b", "a.", "a.lock", "a.LOCK", "a.b.lock", "a..."]) {
        assert!(BranchKey::parse(text).is_err(), "{text:?}");
    }
}

/// L1: The branch is below `sandbox/`, whatever the key.
#[test]
fn the_branch_is_below_sandbox() {
    for key in ["main", "HEAD", "ISSUE-12", "a.b_c-d", "lock", "refs"] {
        let branch = SandboxBranch::from_key(BranchKey::parse(key).unwrap());
        assert_eq!(branch.to_ref(), format!("refs/heads/sandbox/{key}"));
    }
}

/// Keys, and texts that are almost keys.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[A-Za-z0-9._-]{0,12}",
        "[a-z.]{0,6}(\\.lock|\\.|\\.\\.|@\\{|~1)?",
        "\\PC{0,8}",
        "[a-c]{95,105}",
    ]
}

proptest! {
    /// L1: A key can be written and read again, and keeps its documented form.
    #[test]
    fn a_key_keeps_to_its_form(text in any_text()) {
        if let Ok(key) = BranchKey::parse(&text) {
            prop_assert_eq!(key.as_str(), &text);
            prop_assert!((1..=100).contains(&text.len()));
            prop_assert!(text.as_bytes()[0].is_ascii_alphanumeric());
            let json = serde_json::to_string(&key).unwrap();
            prop_assert_eq!(serde_json::from_str::<BranchKey>(&json).unwrap(), key);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// L1: Git accepts the branch of every key.
    #[test]
    fn git_accepts_the_branch_of_every_key(text in any_text()) {
        if let Ok(key) = BranchKey::parse(&text) {
            let branch = SandboxBranch::from_key(key).to_ref();
            let checked = Command::new("git").args(["check-ref-format", &branch]).status().unwrap();
            prop_assert!(checked.success(), "{}", branch);
        }
    }
}
