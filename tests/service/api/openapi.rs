//! A4: Tests of the service's API description.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::run_body;
use crate::support::service::ServiceSetup;

/// The snapshot shows a change to developers of clients.
#[tokio::test(flavor = "multi_thread")]
async fn the_description_is_served_without_a_grant() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let response = setup.client().get("/api/v1/openapi.json").await;
    assert_eq!(response.header("content-type"), Some("application/json"));
    let mut document = response.json();
    assert_eq!(document["openapi"], "3.1.0");
    document["info"]["version"] = "[version]".into();
    insta::assert_json_snapshot!(document);
    setup.stop(service);
}

/// Everything in the description has a sentence that explains it, and each operation has an id of its own.
#[tokio::test(flavor = "multi_thread")]
async fn everything_is_described() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let document = setup.client().get("/api/v1/openapi.json").await.json();
    let (mut missing, mut ids) = (vec![], BTreeSet::new());
    let is_sentence = |text: &Value| text.as_str().is_some_and(|text| text.ends_with('.'));
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(ids.insert(id), "`{id}` is the id of two operations");
            assert!(operation["summary"].is_string() && operation["tags"][0].is_string(), "{id}");
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let answers = operation["responses"].as_object().unwrap().values();
            let unexplained = parameters.chain(answers).any(|it| !is_sentence(&it["description"]));
            missing.extend(unexplained.then(|| format!("{method} {path}")));
        }
    }
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        missing.extend((!is_sentence(&schema["description"])).then(|| name.clone()));
        let own = [schema.clone()];
        for part in schema["allOf"].as_array().map_or(&own[..], Vec::as_slice) {
            for (field, value) in part["properties"].as_object().into_iter().flatten() {
                // A field that may be null has its description beside the reference.
                let texts = [
                    &value["description"],
                    &value["oneOf"][0]["description"],
                    &value["oneOf"][1]["description"],
                ];
                missing.extend(
                    (!texts.into_iter().any(is_sentence)).then(|| format!("{name}.{field}")),
                );
            }
        }
    }
    assert_eq!(missing, Vec::<String>::new());
    assert_eq!(document["servers"][0]["url"], "/");
    setup.stop(service);
}

/// The results and events of real runs have the forms that the description gives them: each event is one of `RunEvent`,
/// and has exactly the described fields.
#[tokio::test(flavor = "multi_thread")]
async fn results_and_events_have_their_described_form() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let document = setup.client().get("/api/v1/openapi.json").await.json();
    let good = service.run(&run_body("fake")).await;
    service.ended(&good).await;
    let failed = service.run(&run_body("fake/status=500")).await;
    service.ended(&failed).await;
    for (run, status) in [(&good, "succeeded"), (&failed, "failed")] {
        let result = service.get(&format!("/api/v1/runs/{run}")).await.json()["result"].clone();
        assert_eq!(result["status"], status, "{result}");
        assert_described(&document, "RunResult", "status", &result);
        for event in service.events(run).await {
            let event = json!({"id": "1", "event": event.kind, "data": event.data});
            assert_described(&document, "RunEvent", "event", &event);
        }
    }
    setup.stop(service);
}

/// Checks a value against the variant of a schema that its discriminator selects: the described fields that are required
/// are there, and no field is undescribed.
fn assert_described(document: &Value, schema: &str, discriminator: &str, value: &Value) {
    let mapping = &document["components"]["schemas"][schema]["discriminator"]["mapping"];
    let variant = mapping[value[discriminator].as_str().unwrap()].as_str();
    let variant = variant.unwrap_or_else(|| panic!("{schema} has no variant for {value}"));
    assert_fields(document, variant, value);
}

fn assert_fields(document: &Value, reference: &str, value: &Value) {
    let schema = document.pointer(reference.trim_start_matches('#')).unwrap();
    let (mut described, mut required) = (Map::new(), vec![]);
    for part in schema["allOf"].as_array().unwrap_or(&vec![schema.clone()]) {
        let part = part["$ref"].as_str().map_or(part, |at| document.pointer(&at[1..]).unwrap());
        described.extend(part["properties"].as_object().unwrap().clone());
        required.extend(part["required"].as_array().cloned().unwrap_or_default());
    }
    let fields = value.as_object().unwrap();
    for name in required {
        assert!(
            fields.contains_key(name.as_str().unwrap()),
            "{reference}: {name} is not in {value}"
        );
    }
    for (name, field) in fields {
        let described = described.get(name);
        let described = described.unwrap_or_else(|| panic!("{reference} describes no {name}"));
        let inner = described["$ref"].as_str().or_else(|| described["oneOf"][1]["$ref"].as_str());
        match inner {
            Some("#/components/schemas/RunResult") => {
                assert_described(document, "RunResult", "status", field);
            }
            Some(inner) => assert_fields(document, inner, field),
            None => (),
        }
    }
}
