//! The probe of a container engine.

use std::path::Path;
use std::time::Duration;

use bollard::models::{SystemInfo, SystemInfoCgroupVersionEnum, SystemVersion};
use bollard::{API_DEFAULT_VERSION, Docker};
use tokio::time::timeout;

use super::{EngineInfo, EngineProbe};
use crate::sandbox::docker::PODMAN_COMPONENT;

/// Asks the engine at `socket` for its facts, and waits a limited time for the answer.
pub async fn probe_engine(socket: &Path) -> EngineProbe {
    if !socket.exists() {
        return EngineProbe::Absent;
    }
    match timeout(PROBE_TIMEOUT, query_engine(socket)).await {
        Ok(Ok(answers)) => EngineProbe::Answers(answers),
        Ok(Err(error)) => EngineProbe::Unresponsive(error.to_string()),
        Err(_) => EngineProbe::Unresponsive(format!(
            "no answer within {}",
            humantime::format_duration(PROBE_TIMEOUT)
        )),
    }
}

async fn query_engine(socket: &Path) -> Result<EngineInfo, bollard::errors::Error> {
    let socket = socket.display().to_string();
    let client = Docker::connect_with_unix(&socket, PROBE_TIMEOUT.as_secs(), API_DEFAULT_VERSION)?;
    let client = client.negotiate_version().await?;
    let (version, info) = tokio::try_join!(client.version(), client.info())?;
    Ok(parse_engine_info(version, info))
}

/// Extracts the facts from the engine's answers.
fn parse_engine_info(version: SystemVersion, info: SystemInfo) -> EngineInfo {
    let runtimes = ["runc", "crun", "OCI Runtime (crun)"];
    let components = version.components.unwrap_or_default();
    let is_podman = components.iter().any(|component| component.name == PODMAN_COMPONENT);
    let has_cgroup_v2 = info.cgroup_version == Some(SystemInfoCgroupVersionEnum::_2);
    let runtime =
        components.into_iter().find(|component| runtimes.contains(&component.name.as_str()));
    let options = info.security_options.unwrap_or_default();
    let has = |name: &str| options.iter().any(|option| option.starts_with(&format!("name={name}")));
    let limits = [
        ("memory", info.memory_limit),
        ("swap", info.swap_limit),
        ("pids", info.pids_limit),
        ("cpu", info.cpu_cfs_quota),
    ];
    EngineInfo {
        version: version.version.unwrap_or_default(),
        api: version.api_version.unwrap_or_default(),
        runtime: runtime.map(|runtime| (runtime.name, runtime.version)),
        has_runsc: info.runtimes.unwrap_or_default().contains_key("runsc"),
        has_seccomp: has("seccomp"),
        has_userns_remap: has("userns"),
        is_rootless: has("rootless"),
        shares_cgroup_namespace: is_podman && !has_cgroup_v2,
        no_limits: limits
            .into_iter()
            // A limit that the engine does not mention counts as available.
            .filter(|(_, set)| *set == Some(false))
            .map(|(name, _)| name)
            .collect(),
    }
}

/// The time for all answers of an engine. Docker Engine answers in milliseconds; Podman starts programs to tell its
/// version, which takes some seconds on a busy machine.
const PROBE_TIMEOUT: Duration = Duration::from_secs(15);
