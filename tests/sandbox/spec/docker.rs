//! Tests of the requests for containers that are not sandboxes, and for Podman.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use bollard::models::{ContainerCreateBody, HostConfig};
use cogni_gateway::sandbox::OwnerProcess;
use cogni_gateway::sandbox::docker::DockerEngine;
use cogni_gateway::sandbox::spec::docker::container_body;
use cogni_gateway::sandbox::spec::docker::gateway_container::{self, GatewayContainerSpec};
use cogni_gateway::sandbox::spec::docker::podman::{self, UserLimits};
use cogni_gateway::sandbox::spec::{BindMount, MountAccess, OwnerLabels};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::example_spec;

/// R3, R4: The gateway's container has a network and nothing that it does not need; its secrets are files.
#[test]
fn the_gateways_container_is_hardened_too() {
    let proxy = GatewayContainerSpec {
        run: "run-1".to_owned(),
        image: "cogni-gateway:dev".to_owned(),
        network: "bridge".to_owned(),
        uid: 1001,
        gid: 1001,
        env: [("LITELLM_MASTER_KEY_FILE", "/cogni/litellm_master_key_file")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        socket_dir: "/run/cogni/run-1/sock".into(),
        mounts: vec![BindMount {
            source: "/run/cogni/run-1/proxy".into(),
            target: "/cogni".into(),
            access: MountAccess::ReadOnly,
        }],
    };
    let body =
        serde_json::to_value(gateway_container::container_body(&proxy, IMAGE, &owner_labels()))
            .unwrap();
    insta::assert_json_snapshot!(body);
}

/// R2: An error has the name of the engine that has failed.
#[tokio::test]
async fn an_error_names_its_engine() {
    for (component, name) in [("Engine", "Docker Engine"), ("Podman Engine", "Podman")] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("engine.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let version = json!({
            "ApiVersion": "1.41",
            "Version": "1",
            "Components": [{"Name": component, "Version": "1"}],
        });
        let engine = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 4096];
                let length = stream.read(&mut request).await.unwrap();
                let is_version = String::from_utf8_lossy(&request[..length]).contains("/version ");
                let (status, body) = if is_version {
                    ("200 OK", version.to_string())
                } else {
                    ("500 X", "{}".to_owned())
                };
                let head = "content-type: application/json\r\nconnection: close\r\ncontent-length";
                let answer = format!("HTTP/1.1 {status}\r\n{head}: {}\r\n\r\n{body}", body.len());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let docker = DockerEngine::connect(&socket).await.unwrap();
        let error = docker.image_id("x").await.unwrap_err().to_string();
        assert_eq!(error, format!("{name} cannot inspect the image"));
        engine.abort();
    }
}

/// R2, R3: Podman gets the same request in its own format; only these lines differ.
#[test]
fn podman_gets_the_same_request_in_its_format() {
    let docker = container_body(&example_spec(), IMAGE, &owner_labels());
    let mut podman = docker.clone();
    let most = UserLimits { processes: 32_768, open_files: 524_288 };
    podman::translate_for_podman(&mut podman, Path::new("/run/cogni/run-1/seccomp.json"), most);
    let lines = |body| {
        let mut body: Value = serde_json::to_value(body).unwrap();
        let options = body["HostConfig"]["SecurityOpt"].as_array_mut().unwrap();
        for option in
            options.iter_mut().filter(|option| option.as_str().unwrap().starts_with("seccomp={"))
        {
            *option = "seccomp={…}".into();
        }
        serde_json::to_string_pretty(&body).unwrap()
    };
    let (docker, podman) = (lines(docker), lines(podman));
    let of = |text: &str, other: &str, mark: &str| -> Vec<String> {
        let only = text.lines().filter(|line| !other.lines().any(|known| known == *line));
        only.map(|line| format!("{mark} {}", line.trim())).collect()
    };
    let differences = [of(&docker, &podman, "-"), of(&podman, &docker, "+")].concat().join("\n");
    insta::assert_snapshot!(differences);
}

/// R2: Podman is asked for no more open files than its user may have, whether or not the request names a number.
#[test]
fn podman_is_asked_for_no_more_than_it_may_allow() {
    let files = |mut body, open_files| {
        podman::limit_for_podman(&mut body, UserLimits { processes: 64, open_files });
        let body: Value = serde_json::to_value(body).unwrap();
        let limits = body["HostConfig"]["Ulimits"].as_array().unwrap().clone();
        let mut files = limits.iter().filter(|limit| limit["Name"] == "nofile");
        let found = files.next().unwrap()["Hard"].as_u64().unwrap();
        assert!(files.next().is_none() && limits.iter().any(|limit| limit["Name"] == "nproc"));
        found
    };
    let sandbox = || container_body(&example_spec(), IMAGE, &owner_labels());
    assert_eq!((files(sandbox(), 524_288), files(sandbox(), 256)), (1024, 256));
    let unlimited = || ContainerCreateBody {
        host_config: Some(HostConfig::default()),
        ..ContainerCreateBody::default()
    };
    assert_eq!((files(unlimited(), u64::MAX), files(unlimited(), 4096)), (1 << 20, 4096));
}

fn owner_labels() -> OwnerLabels {
    let owner = OwnerProcess::parse("0123456789abcdef:42:4242:4026531836").unwrap();
    OwnerLabels {
        owner,
        run_dir: "/run/cogni".into(),
        deadline: UNIX_EPOCH + Duration::from_secs(1_800_000_001),
    }
}

const IMAGE: &str = "sha256:0123";
