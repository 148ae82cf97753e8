{{/* The environment of a service that is no secret, as a map; of a dict with root, name and service. */}}
{{- define "rollmill.environment" -}}
{{- $values := .root.Values -}}
{{ include "rollmill.kafkaEnvironment" .root }}
{{- if ne .name "ledger" }}
ROLLMILL_DRAIN_SECONDS: {{ $values.drainSeconds | quote }}
ROLLMILL_HEALTH_HOST: 0.0.0.0
ROLLMILL_HEALTH_PORT: "9400"
{{- end }}
{{- if has .name (list "builder" "reward-merger") }}
ROLLMILL_PROCESSES: {{ max 1 (int .service.replicas) | quote }}
{{- end }}
{{- if eq .name "capture" }}
ROLLMILL_HOST: 0.0.0.0
ROLLMILL_PORT: "8700"
ROLLMILL_API_KEYS_FILE: /etc/rollmill/keys/keys.json
ROLLMILL_SPOOL_DIR: /var/lib/rollmill/spool
{{- if not (hasKey .service.settings "public_url") }}
ROLLMILL_PUBLIC_URL: http://{{ include "rollmill.fullname" .root }}-capture.{{ .root.Release.Namespace }}.svc:{{ .service.service.port }}
{{- end }}
{{- end }}
{{- if eq .name "builder" }}
ROLLMILL_SPILL_DIRECTORY: /var/lib/rollmill/spill
{{- end }}
{{- range $name, $value := .service.settings }}
ROLLMILL_{{ upper $name }}: {{ include "rollmill.value" $value | quote }}
{{- end }}
{{- range $name, $value := $values.environment }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* Variables that a ConfigMap cannot hold: secrets, and the ordinal of the pod (rule T1). */}}
{{- define "rollmill.variables" -}}
{{- if has .name (list "builder" "reward-merger") }}
- name: ROLLMILL_PROCESS_INDEX
  valueFrom: { fieldRef: { fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']" } }
{{- end }}
{{- include "rollmill.kafkaSecrets" .root }}
{{- range $name, $secret := .service.secretSettings }}
- name: ROLLMILL_{{ upper $name }}
  valueFrom: { secretKeyRef: { name: {{ $secret.name }}, key: {{ $secret.key }} } }
{{- end }}
{{- end -}}
