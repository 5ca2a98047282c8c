//! The translation of Docker's seccomp profile into filters for the kernel, so that both drivers share one file.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule,
};
use serde::Deserialize;
use syscalls::Sysno;

/// Two filters, to be applied in this order. The kernel asks both about each call; of two errors, the later filter's
/// counts.
#[derive(Clone, Debug)]
pub struct SeccompFilters {
    /// Allows the calls of the profile; for every other call, the error says that it does not exist.
    pub allow: BpfProgram,
    /// Denies calls by name, with Docker's default error.
    pub deny: BpfProgram,
}

/// The error of an invalid profile; no sandbox is made then.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    #[error("the filter of system calls is not in Docker's form")]
    Form(#[from] serde_json::Error),
    #[error("the filter of system calls has {0}, which is not supported")]
    Unknown(String),
    #[error("the filter of system calls cannot be compiled")]
    Compile(#[from] BackendError),
}

/// The part of Docker's format that the profile uses. An unknown field is an error, so that no rule is lost silently.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DockerSeccompProfile {
    default_action: String,
    default_errno_ret: u32,
    #[serde(rename = "archMap")]
    _architectures: serde::de::IgnoredAny,
    syscalls: Vec<DockerSeccompRule>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DockerSeccompRule {
    #[serde(rename = "comment")]
    _comment: Option<serde::de::IgnoredAny>,
    names: Vec<String>,
    action: String,
    errno_ret: Option<u32>,
    #[serde(default)]
    args: Vec<DockerSeccompArg>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DockerSeccompArg {
    index: u8,
    value: u64,
    #[serde(default)]
    value_two: u64,
    op: String,
}

/// Compiles `profile`. Names of calls that this architecture does not have are left out: no process can make such a
/// call.
///
/// # Errors
/// Returns an error if the profile has a part that the filters cannot express.
pub fn compile_profile(profile: &str) -> Result<SeccompFilters, SeccompError> {
    let profile: DockerSeccompProfile = serde_json::from_str(profile)?;
    if profile.default_action != ACTION_ERRNO {
        return Err(SeccompError::Unknown(format!("`defaultAction` `{}`", profile.default_action)));
    }
    // A filter has one action for all its rules, so the allowed and the denied calls need a filter each.
    let (mut allowed, mut denied) = (RulesBySyscall::new(), RulesBySyscall::new());
    for rule in &profile.syscalls {
        match (rule.action.as_str(), rule.errno_ret.unwrap_or(DEFAULT_ERRNO)) {
            (ACTION_ALLOW, _) => add_rule(&mut allowed, rule)?,
            (ACTION_ERRNO, DEFAULT_ERRNO) if rule.args.is_empty() => {
                add_rule(&mut denied, rule)?;
            }
            // A call that is not allowed gets this error anyway.
            (ACTION_ERRNO, errno) if errno == profile.default_errno_ret => (),
            _ => return Err(SeccompError::Unknown(format!("a rule `{}`", rule.action))),
        }
    }
    let default = SeccompAction::Errno(profile.default_errno_ret);
    Ok(SeccompFilters {
        allow: build_filter(allowed, default, SeccompAction::Allow)?,
        deny: build_filter(denied, SeccompAction::Allow, SeccompAction::Errno(DEFAULT_ERRNO))?,
    })
}

type RulesBySyscall = BTreeMap<i64, Vec<SeccompRule>>;

/// Adds a rule to its calls. One matching rule of a call is enough; a call without rules matches for all arguments.
fn add_rule(calls: &mut RulesBySyscall, rule: &DockerSeccompRule) -> Result<(), SeccompError> {
    for call in rule.names.iter().filter_map(|name| name.parse::<Sysno>().ok()) {
        let rules = calls.entry(call.id().into()).or_default();
        if !rule.args.is_empty() {
            let conditions = rule.args.iter().map(argument_condition).collect::<Result<_, _>>()?;
            rules.push(SeccompRule::new(conditions)?);
        }
    }
    Ok(())
}

fn argument_condition(argument: &DockerSeccompArg) -> Result<SeccompCondition, SeccompError> {
    let DockerSeccompArg { index, value, value_two, ref op } = *argument;
    let (op, value) = match op.as_str() {
        "SCMP_CMP_EQ" => (SeccompCmpOp::Eq, value),
        // Docker's `value` is the mask, and `valueTwo` the value to compare with.
        "SCMP_CMP_MASKED_EQ" => (SeccompCmpOp::MaskedEq(value), value_two),
        op => return Err(SeccompError::Unknown(format!("a comparison `{op}`"))),
    };
    Ok(SeccompCondition::new(index, SeccompCmpArgLen::Qword, op, value)?)
}

fn build_filter(
    calls: RulesBySyscall,
    otherwise: SeccompAction,
    then: SeccompAction,
) -> Result<BpfProgram, SeccompError> {
    let architecture = std::env::consts::ARCH.try_into()?;
    Ok(SeccompFilter::new(calls, otherwise, then, architecture)?.try_into()?)
}

const ACTION_ALLOW: &str = "SCMP_ACT_ALLOW";
const ACTION_ERRNO: &str = "SCMP_ACT_ERRNO";

/// The error number of a rule that names none, as in Docker: `EPERM`.
const DEFAULT_ERRNO: u32 = 1;
