//! Any key gives one branch below `sandbox/`, in the form that git requires.
#![cfg_attr(fuzzing, no_main)]

use cogni_gateway::relay::repo::{BranchKey, SandboxBranch};

cogni_gateway_fuzz::fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let Ok(key) = BranchKey::parse(&text) else { return };
    assert_eq!(key.as_str(), text);
    let name = SandboxBranch::from_key(key).to_ref();
    let rest = name.strip_prefix("refs/heads/sandbox/").expect("it is below `sandbox/`");
    assert!((1..=100).contains(&rest.len()) && rest.as_bytes()[0].is_ascii_alphanumeric());
    let forbidden = |byte: u8| byte <= b' ' || byte >= 0x7f || b"~^:?*[\\/@{}".contains(&byte);
    assert!(!rest.bytes().any(forbidden), "{rest:?}");
    assert!(!rest.contains("..") && !rest.ends_with('.') && !rest.ends_with(".lock"), "{rest:?}");
});
