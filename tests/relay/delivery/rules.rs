//! A1, L5: Tests of merged rules: an agent's own rules make its host's rules stricter, and never weaker.

use cogni_gateway::relay::delivery::rules::{AgentReviewPolicy, AgentReviewRules, ReviewRules};
use cogni_gateway::relay::repo::review::{
    CredentialKind, PathPattern, PathRule, RelayConfig, ReviewAction, ReviewPolicy, ReviewReason,
};
use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::repo::setup::RelaySetup;

/// A1, L5: A rule that the agent does not set stays the host's, also if the host's rule is weaker than the built-in
/// one.
#[test]
fn an_agent_without_rules_changes_nothing() {
    let host = host_policy("review_files = 5000\nsubmodule = 'push'\nsecrets = []");
    assert_eq!(AgentReviewPolicy::default().tighten(&host), host);
    let rules = ReviewRules::new(&host, Some(&AgentReviewRules::default()));
    assert_eq!(rules.parse_policy().unwrap(), host);
    assert_eq!(ReviewRules::new(&host, None).parse_policy().unwrap(), host);
}

/// A1, L5: If both set a rule, the stricter one holds, and the operator learns which of the agent's rules have no
/// effect.
#[test]
fn the_stricter_of_two_rules_holds() {
    let host = host_policy("review_files = 10\nhold_files = 20\nnew_program = 'hold'");
    let own: AgentReviewPolicy = toml::from_str(
        "review_files = 5\nhold_files = 50\nnew_program = 'review'\nlfs_pointer = 'hold'\n\
         [[paths]]\nwhy = 'ours'\nverdict = 'hold'\nmatch = ['docs/**']\n[[secrets]]\nname = 'our key'\npattern = 'K-[0-9]+'",
    )
    .unwrap();
    let both = own.tighten(&host);
    assert_eq!((both.review_files, both.hold_files), (5, 20));
    assert_eq!((both.new_program, both.lfs_pointer), (ReviewAction::Hold, ReviewAction::Hold));
    assert_eq!(both.secrets.len(), host.secrets.len() + 1);
    assert_eq!(both.rules_for_path(b"docs/AGENTS.md").count(), 2);
    assert_eq!(own.ineffective_rules(&host), ["hold_files", "new_program"]);
    let named = ["hold_files", "lfs_pointer", "new_program", "paths", "review_files", "secrets"];
    assert_eq!(own.rule_names(), named);
}

/// A1, L5: With real work that violates every kind of rule, every reason that the host's rules give remains.
#[test]
fn an_agents_rules_remove_no_reason() {
    let mut setup = RelaySetup::new();
    let run = setup.begin("rules", "one");
    for path in ["docs/a", "src/a/b", ".github/b", "b"] {
        run.workspace.write(path, "abc7 bca1 caa9 aab4\n".repeat(30));
    }
    run.workspace.git(["add", "--all"]);
    run.workspace.git(["update-index", "--chmod=+x", "b"]);
    run.workspace.git(["commit", "--quiet", "--message", "Work\n\nSandbox-Run: run-9"]);
    let announced = setup.extract(&run).unwrap().unwrap();
    let mut judged = |policy: &ReviewPolicy| {
        setup.config.policy = policy.clone();
        setup.judge(&run, announced.clone()).unwrap().verdict().clone()
    };
    let mut runner = TestRunner::deterministic();
    let mut stricter_ones = 0;
    for _ in 0..12 {
        let (host, own) = (policy(), stricter()).new_tree(&mut runner).unwrap().current();
        let (alone, both) = (judged(&host), judged(&own.tighten(&host)));
        for reason in alone.reasons() {
            let is_kept = |other_reason: &ReviewReason| {
                (&other_reason.path, &other_reason.why) == (&reason.path, &reason.why)
                    && other_reason.ruling >= reason.ruling
            };
            assert!(both.reasons().iter().any(is_kept), "{reason:?}: {host:?} {own:?}");
        }
        stricter_ones += usize::from(alone != both);
    }
    assert!(stricter_ones > 3, "the agent's rules changed next to nothing");
}

/// L5, L7: Recorded rules have the format of a rules file, and an unknown rule is an error.
#[test]
fn recorded_rules_have_the_format_of_a_file() {
    let own: AgentReviewRules = toml::from_str("[policy]\nhold_files = 3\n").unwrap();
    let rules = ReviewRules::new(&RelayConfig::default().policy, Some(&own));
    let text = rules.as_str();
    insta::assert_snapshot!(text.lines().take(3).collect::<Vec<_>>().join("\n"), @r#"
    [policy]
    review_files = 300
    hold_files = 10000
    "#);
    assert!(text.ends_with("[agent.policy]\nhold_files = 3\n"), "{text}");
    let stored_rules = |text: &str| serde_json::from_value::<ReviewRules>(text.into()).unwrap();
    assert_eq!(stored_rules(text), rules);
    let later = stored_rules(&text.replace("hold_files = 3", "hold_on_tuesdays = true"));
    assert!(later.parse_policy().is_err());
    // A rule that did not exist then has its built-in value.
    let earlier = stored_rules(&text.replace("lfs_pointer = \"review\"\n", ""));
    assert_eq!(earlier.parse_policy().unwrap(), rules.parse_policy().unwrap());
    let now =
        rules.with_host_policy(&host_policy("review_files = 1")).unwrap().parse_policy().unwrap();
    assert_eq!((now.review_files, now.hold_files), (1, 3));
}

proptest! {
    /// A1, L5: The merged rules never accept anything that the host's rules do not accept.
    #[test]
    fn merged_rules_are_never_weaker_than_the_hosts(host in policy(), own in stricter(), path in any_path()) {
        let both = own.tighten(&host);
        prop_assert!(both.review_files <= host.review_files && both.hold_files <= host.hold_files);
        prop_assert!(both.review_file_bytes <= host.review_file_bytes);
        prop_assert!(both.hold_file_bytes <= host.hold_file_bytes);
        for (both, host) in list_rulings(&both).into_iter().zip(list_rulings(&host)) {
            prop_assert!(both >= host);
        }
        prop_assert!(host.secrets.iter().all(|kind| both.secrets.contains(kind)));
        prop_assert!(own.secrets.iter().all(|kind| both.secrets.contains(kind)));
        let says = |policy: &ReviewPolicy| policy.rules_for_path(path.as_bytes()).map(|rule| rule.verdict).max();
        prop_assert!(says(&both) >= says(&host));
        // The merged rules accept nothing that the agent's rules reject, and accept everything that both accept.
        let alone = ReviewPolicy { paths: own.paths.clone(), ..host.clone() };
        prop_assert_eq!(says(&both), says(&host).max(says(&alone)));
    }

    /// L7: Recorded rules are the rules that reviewed the work, and they are always written as the same text.
    #[test]
    fn recorded_rules_are_read_unchanged(host in policy(), own in stricter()) {
        let rules = ReviewRules::new(&host, Some(&AgentReviewRules { policy: own.clone() }));
        let kept: ReviewRules = serde_json::from_str(&serde_json::to_string(&rules).unwrap()).unwrap();
        prop_assert_eq!(kept.parse_policy().unwrap(), own.tighten(&host));
        prop_assert_eq!(kept.digest(), rules.digest());
        prop_assert_eq!(kept.with_host_policy(&host).unwrap(), rules);
    }

    /// A1: Merging the same rules twice has the effect of merging them once.
    #[test]
    fn merging_rules_twice_changes_nothing(host in policy(), own in stricter()) {
        let once = own.tighten(&host);
        prop_assert_eq!(own.tighten(&once), once);
    }
}

fn host_policy(policy: &str) -> ReviewPolicy {
    RelayConfig::parse(&format!("[policy]\n{policy}")).unwrap().policy
}

fn list_rulings(policy: &ReviewPolicy) -> [ReviewAction; 10] {
    let ReviewPolicy { submodule, link_outside, new_program, strange_path, .. } = *policy;
    let ReviewPolicy { lfs_pointer, claims_provenance, strange_date, .. } = *policy;
    let ReviewPolicy { foreign_encoding, work_elsewhere, secret, .. } = *policy;
    [
        submodule,
        link_outside,
        new_program,
        strange_path,
        lfs_pointer,
        claims_provenance,
        strange_date,
        foreign_encoding,
        work_elsewhere,
        secret,
    ]
}

fn any_action() -> impl Strategy<Value = ReviewAction> {
    prop_oneof![Just(ReviewAction::Push), Just(ReviewAction::Review), Just(ReviewAction::Hold)]
}

/// A small set, so that the two lists often contain the same path.
fn any_path() -> impl Strategy<Value = String> {
    "(docs|src|\\.github)(/[ab]){0,2}"
}

fn any_path_rules() -> impl Strategy<Value = Vec<PathRule>> {
    let pattern = "(docs|src|\\.github|\\*|\\*\\*)(/([ab]|\\*|\\*\\*)){0,2}";
    let rule = (any_action(), vec(pattern, 1..3), "[a-z]{1,5}");
    vec(rule, 0..4).prop_map(|rules| {
        let rule = |(verdict, patterns, why): (_, Vec<String>, _)| PathRule {
            why,
            verdict,
            patterns: patterns.iter().map(|text| PathPattern::new(text)).collect(),
        };
        rules.into_iter().map(rule).collect()
    })
}

fn any_kinds() -> impl Strategy<Value = Vec<CredentialKind>> {
    vec(("[a-c]", "[a-c]{3}\\[0-9\\]"), 0..3).prop_map(|kinds| {
        kinds.into_iter().map(|(name, pattern)| CredentialKind { name, pattern }).collect()
    })
}

prop_compose! {
    fn policy()(
        rulings in vec(any_action(), 10),
        numbers in vec(0..1000_u32, 4),
        paths in any_path_rules(),
        secrets in any_kinds(),
    ) -> ReviewPolicy {
        ReviewPolicy {
            review_files: numbers[0] as usize,
            hold_files: numbers[1] as usize,
            review_file_bytes: numbers[2].into(),
            hold_file_bytes: numbers[3].into(),
            submodule: rulings[0],
            link_outside: rulings[1],
            new_program: rulings[2],
            strange_path: rulings[3],
            lfs_pointer: rulings[4],
            claims_provenance: rulings[5],
            work_elsewhere: rulings[6],
            secret: rulings[7],
            strange_date: rulings[8],
            foreign_encoding: rulings[9],
            paths,
            secrets,
            own_paths: vec![],
        }
    }
}

prop_compose! {
    fn stricter()(
        rulings in vec(of(any_action()), 10),
        numbers in vec(of(0..1000_u32), 4),
        paths in any_path_rules(),
        secrets in any_kinds(),
    ) -> AgentReviewPolicy {
        AgentReviewPolicy {
            review_files: numbers[0].map(|number| number as usize),
            hold_files: numbers[1].map(|number| number as usize),
            review_file_bytes: numbers[2].map(u64::from),
            hold_file_bytes: numbers[3].map(u64::from),
            submodule: rulings[0],
            link_outside: rulings[1],
            new_program: rulings[2],
            strange_path: rulings[3],
            lfs_pointer: rulings[4],
            claims_provenance: rulings[5],
            work_elsewhere: rulings[6],
            secret: rulings[7],
            strange_date: rulings[8],
            foreign_encoding: rulings[9],
            paths,
            secrets,
        }
    }
}
