//! The translation of a sandbox into Docker Engine's API. The translation is pure: the enforced settings can be read
//! and tested without an engine.

pub mod gateway_container;
pub mod podman;

use std::collections::HashMap;
use std::path::Path;
use std::time::UNIX_EPOCH;

use bollard::models::{
    ContainerCreateBody, HealthConfig, HostConfig, HostConfigCgroupnsModeEnum, HostConfigLogConfig,
    Mount as BodyMount, MountBindOptions, MountBindOptionsPropagationEnum, MountType,
    ResourcesUlimits, RestartPolicy, RestartPolicyNameEnum,
};

use super::layout::{HOSTNAME, MASKED_PATHS, OOM_SCORE_ADJ, READ_ONLY_PATHS, TmpfsMount, ULIMITS};
use super::{BindMount, MountAccess, OwnerLabels, SECCOMP_PROFILE, SandboxSpec};
use crate::base::digest::sha256_hex;

/// Returns the request that creates the container, from an image that the engine has.
pub fn container_body(spec: &SandboxSpec, image: &str, stamp: &OwnerLabels) -> ContainerCreateBody {
    let environment = spec.environment().into_iter().map(|(name, value)| format!("{name}={value}"));
    let mut body = ContainerCreateBody {
        image: Some(image.to_owned()),
        // The gateway's entrypoint replaces the image's entrypoint and command.
        entrypoint: Some(spec.init_command()),
        env: Some(environment.collect()),
        user: Some(format!("{0}:{0}", spec.uid)),
        working_dir: Some(spec.working_dir().to_owned()),
        hostname: Some(HOSTNAME.to_owned()),
        network_disabled: Some(true),
        // An image's health check would start beside the first process, outside of its restrictions.
        healthcheck: Some(HealthConfig {
            test: Some(vec!["NONE".to_owned()]),
            ..HealthConfig::default()
        }),
        stop_signal: Some("SIGTERM".to_owned()),
        host_config: Some(host_config(spec)),
        ..ContainerCreateBody::default()
    };
    // The digest covers the whole request, so the labels come after it.
    let digest = body_digest(&body);
    body.labels = Some(owner_labels(&spec.run, stamp, digest));
    body
}

fn host_config(spec: &SandboxSpec) -> HostConfig {
    let limits = &spec.limits;
    let memory = i64::try_from(limits.max_memory).unwrap_or(i64::MAX);
    HostConfig {
        // Each restriction is stated, also if it is the engine's default: an operator can change the defaults.
        network_mode: Some("none".to_owned()),
        cap_drop: Some(vec!["ALL".to_owned()]),
        security_opt: Some(vec![
            "no-new-privileges".to_owned(),
            format!("seccomp={SECCOMP_PROFILE}"),
        ]),
        privileged: Some(false),
        readonly_rootfs: Some(true),
        masked_paths: Some(owned_texts(MASKED_PATHS)),
        readonly_paths: Some(owned_texts(READ_ONLY_PATHS)),
        tmpfs: Some(tmpfs_map(spec)),
        mounts: Some(body_mounts(spec)),
        pids_limit: Some(limits.pids.into()),
        memory: Some(memory),
        // Memory and swap together: there is no swap.
        memory_swap: Some(memory),
        nano_cpus: Some(nano_cpus(limits.cpus)),
        ulimits: Some(ULIMITS.map(resource_limit).into()),
        oom_score_adj: Some(OOM_SCORE_ADJ.into()),
        ipc_mode: Some("private".to_owned()),
        cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
        // `cogni-init` reaps processes; without it, the engine's own init does.
        init: Some(spec.init.is_none()),
        // The gateway is attached to the output, and the engine stores no copy of it.
        log_config: Some(HostConfigLogConfig { typ: Some("none".to_owned()), config: None }),
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        auto_remove: Some(false),
        ..HostConfig::default()
    }
}

fn tmpfs_map(spec: &SandboxSpec) -> HashMap<String, String> {
    spec.tmpfs_mounts(spec.uid)
        .into_iter()
        .map(|TmpfsMount { target, options }| (target.to_owned(), options))
        .collect()
}

fn body_mounts(spec: &SandboxSpec) -> Vec<BodyMount> {
    let volumes = spec.volumes.iter().map(|volume| BodyMount {
        typ: Some(MountType::VOLUME),
        source: Some(volume.name.clone()),
        ..mount_body(&volume.target, volume.access)
    });
    spec.bind_mounts().iter().map(bind_body).chain(volumes).collect()
}

fn bind_body(of: &BindMount) -> BodyMount {
    BodyMount {
        typ: Some(MountType::BIND),
        source: Some(of.source.display().to_string()),
        bind_options: Some(MountBindOptions {
            propagation: Some(MountBindOptionsPropagationEnum::RPRIVATE),
            // The mounts below the source stay out: they were not requested, and would be writable even if this is not.
            non_recursive: Some(true),
            ..MountBindOptions::default()
        }),
        ..mount_body(&of.target, of.access)
    }
}

fn mount_body(target: &Path, access: MountAccess) -> BodyMount {
    BodyMount {
        target: Some(target.display().to_string()),
        read_only: Some(access == MountAccess::ReadOnly),
        ..BodyMount::default()
    }
}

fn owned_texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn resource_limit((name, limit): (&str, u64)) -> ResourcesUlimits {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    ResourcesUlimits { name: Some(name.to_owned()), soft: Some(limit), hard: Some(limit) }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a checked number of processors is at most 1024"
)]
fn nano_cpus(cpus: f64) -> i64 {
    (cpus * 1e9).round() as i64
}

fn owner_labels(run: &str, stamp: &OwnerLabels, digest: String) -> HashMap<String, String> {
    let deadline = stamp.deadline.duration_since(UNIX_EPOCH).unwrap_or_default();
    HashMap::from([
        (OWNER_LABEL.to_owned(), stamp.owner.to_string()),
        (RUN_LABEL.to_owned(), run.to_owned()),
        (DIR_LABEL.to_owned(), stamp.run_dir.display().to_string()),
        (DEADLINE_LABEL.to_owned(), deadline.as_secs().to_string()),
        (SPEC_LABEL.to_owned(), digest),
    ])
}

/// Returns the digest of a request without its labels. The request becomes a JSON value first, which sorts its keys:
/// the maps of the client library have no order.
fn body_digest(body: &ContainerCreateBody) -> String {
    let body = serde_json::to_value(body).expect("a body of texts and numbers is JSON");
    sha256_hex(body.to_string().as_bytes())
}

pub const OWNER_LABEL: &str = "cogni.owner";
pub const RUN_LABEL: &str = "cogni.run";
/// The label with the run directory of the installation, without symlinks.
pub const DIR_LABEL: &str = "cogni.dir";
/// The label with the deadline, in seconds since 1970.
pub const DEADLINE_LABEL: &str = "cogni.deadline";
/// The label with the SHA-256 digest of the request.
pub const SPEC_LABEL: &str = "cogni.spec";
